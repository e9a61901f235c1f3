// Sizes for sampled_softmax and its backward: without CANN, so that tests exercise what the host computes.
#pragma once

#include "cube_tiling.h"
#include "launch.h"
#include "sampled_softmax_sizes.h"

namespace turbogr {

constexpr int64_t kMostSampledPairs = int64_t{1} << 40;  // what a group costs is counted in 32 bits, in units of 1024

// Cycles that a vector core needs for a logit, and its half of a cube core for a byte of the other side: about.
constexpr double kLogitCycles = 0.1, kByteCycles = 2.0 / 110.0;

// `loaded` is what the cube reads of each row of the other side, in bytes. Blocks are no larger than it takes to give
// each core one. The sums of a row have the same order for all sizes, so that the number of cores does not change them.
inline SampledSweep Sweep(int64_t rows, int64_t others, int64_t loaded, int64_t cores) {
  const int64_t padded = others < 1 ? 64 : (others + 63) / 64 * 64;
  SampledSweep sweep = {};
  sweep.tile = padded < kTile ? padded : kTile;
  sweep.block = 32;
  while (sweep.block < kMostBlock && sweep.block * cores < rows) sweep.block *= 2;
  sweep.slot = sweep.block * sweep.tile;
  sweep.loadRows = loaded * kByteCycles / kLogitCycles;
  return sweep;
}

// Whether the kernels take these sizes.
inline bool TakesSampled(int64_t rows, int64_t negatives, int64_t groups, int64_t width) {
  const bool counted = rows < (int64_t{1} << 31) && negatives < (int64_t{1} << 31) && groups < (int64_t{1} << 31);
  const bool wide = width >= 16 && width % 16 == 0 && width <= kMostSampledWidth;
  return counted && wide && rows * negatives <= kMostSampledPairs;
}

template <typename Problem>
inline SampledShape Shape(const Problem& p) {
  SampledShape shape = {};
  shape.rows = p.rows;
  shape.negatives = p.negatives;
  shape.groups = p.groups;
  shape.width = p.width;
  shape.hasIds = p.hasIds;
  shape.hasScales = p.hasScales;
  shape.scale = p.scale;
  return shape;
}

inline int64_t AlignGlobal(int64_t bytes) { return (bytes + 511) / 512 * 512; }

// Cube cores: each comes with two vector cores, and there is a row for each of those.
inline int64_t CubeCores(int64_t rows, int64_t cores) {
  const int64_t busy = rows < 1 ? 1 : rows < cores ? rows : cores;
  return (busy + 1) / 2;
}

}  // namespace turbogr
