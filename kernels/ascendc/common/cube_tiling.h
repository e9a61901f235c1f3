// Tiling of a matrix product of at most m x n x k, without CANN: sizes that fit the buffers of the cube core.
#pragma once

#include <cstdint>

#include "kernel_tiling/kernel_tiling.h"

namespace turbogr {

constexpr int32_t kL0Bytes = 64 * 1024;    // of L0A and of L0B, halved by double buffering
constexpr int32_t kL0cBytes = 128 * 1024;  // of L0C, in floats

inline int32_t AlignUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }

// `bytes` is the size of an element of A and B.
inline TCubeTiling CubeTiling(int32_t m, int32_t n, int32_t k, int32_t bytes) {
  TCubeTiling t;
  t.usedCoreNum = 1;
  t.M = t.singleCoreM = m;
  t.N = t.singleCoreN = n;
  t.Ka = t.Kb = t.singleCoreK = k;
  t.baseM = AlignUp(m < 128 ? m : 128, 16);
  t.baseN = AlignUp(n < 256 ? n : 256, 16);
  const int32_t widest = kL0Bytes / 2 / bytes / (t.baseM > t.baseN ? t.baseM : t.baseN) / 16 * 16;
  const int32_t wanted = AlignUp(k < 128 ? k : 128, 16);
  t.baseK = wanted < widest ? wanted : widest;
  t.stepM = t.stepN = t.stepKa = t.stepKb = 1;
  t.depthA1 = t.depthB1 = 2;
  t.dbL0A = t.dbL0B = 2;
  t.dbL0C = t.baseM * t.baseN * 4 * 2 <= kL0cBytes ? 2 : 1;
  t.iterateOrder = 0;
  return t;
}

}  // namespace turbogr
