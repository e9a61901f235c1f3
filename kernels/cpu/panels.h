// Small matrix products on panels: the arithmetic of attention, close to what the machine can do.
//
// A panel holds kWide columns of a matrix, row after row: element (i, c) lies at [c / kWide][i][c % kWide]. Every
// operand that a product streams is such a panel, so its loads are consecutive. A tile is kTall rows of one panel; its
// sums stay in registers while the product runs along the inner dimension.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rowwise.h"

namespace turbogr {

using V = Lanes;
constexpr int kLane = int(kWidth);
constexpr int kWide = 2 * kLane;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTall = 12;  // 24 sums in 32 registers
#else
constexpr int kTall = 6;  // 12 sums in 16 registers
#endif

TURBOGR_INLINE int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// tile[m][n] += sum over k of a[m * kRow + k * kStep] * b[k * kWide + n]
template <int kRow, int kStep>
TURBOGR_INLINE void multiply(int64_t count, const Real* a, const Real* b, V (&tile)[kTall][2]) {
  if (count < 1) __builtin_unreachable();
#pragma GCC unroll 2
  for (int64_t k = 0; k < count; ++k) {
    const V left = load(b), right = load(b + kLane);
#pragma GCC unroll 12
    for (int m = 0; m < kTall; ++m) {
      const V scalar = broadcast(a[m * kRow]);
      tile[m][0] += scalar * left;
      tile[m][1] += scalar * right;
    }
    a += kStep;
    b += kWide;
  }
}

// c = a bᵀ for one tile: kTall rows of panels `a` (panel stride `a_panel`), against kWide rows of b, transposed.
// c has kPitch numbers from row to row.
template <int kPitch>
__attribute__((noinline)) void score_tile(int64_t depth, const Real* a, int64_t a_panel, const Real* b, Real* c) {
  V tile[kTall][2] = {};
  for (int64_t k = 0; k < depth; k += kWide, a += a_panel, b += kWide * kWide)
    multiply<kWide, 1>(std::min<int64_t>(kWide, depth - k), a, b, tile);
#pragma GCC unroll 12
  for (int m = 0; m < kTall; ++m) {
    store(c + m * kPitch, tile[m][0]);
    store(c + m * kPitch + kLane, tile[m][1]);
  }
}

// c += a b for one tile of panel c; `a` is read by rows (kRow = pitch, kStep = 1) or transposed (kRow = 1).
template <int kRow, int kStep>
__attribute__((noinline)) void add_tile(int64_t count, const Real* a, const Real* b, Real* c) {
  V tile[kTall][2];
#pragma GCC unroll 12
  for (int m = 0; m < kTall; ++m) {
    tile[m][0] = load(c + m * kWide);
    tile[m][1] = load(c + m * kWide + kLane);
  }
  multiply<kRow, kStep>(count, a, b, tile);
#pragma GCC unroll 12
  for (int m = 0; m < kTall; ++m) {
    store(c + m * kWide, tile[m][0]);
    store(c + m * kWide + kLane, tile[m][1]);
  }
}

// The product of two rows.
template <typename S>
Real inner(const S* x, const S* y, int64_t count) {
  return total(count, [&](int64_t at, auto cut) { return load_lanes(x + at, cut) * load_lanes(y + at, cut); });
}

// kCount numbers, a count that the compiler knows.
template <int kCount, typename S>
TURBOGR_INLINE void scale_row(const S* from, Real factor, Real* to) {
  for (int k = 0; k < kCount; k += kLane) store(to + k, factor * load_lanes(from + k, Whole{}));
}

// Rows of a tensor as panels of `rows` rows each, multiplied by `factor`; columns behind `depth` and rows behind
// `count` are zero. `row(i)` gives the address of row i.
template <typename S, typename Row>
void pack_panels(Row row, int64_t count, int64_t rows, int64_t depth, Real factor, Real* to) {
  const int64_t whole = depth / kWide * kWide, rest = depth - whole;
  for (int64_t i = 0; i < count; ++i) {
    const S* from = row(i);
    Real* out = to + i * kWide;
    for (int64_t c = 0; c < whole; c += kWide, out += rows * kWide) scale_row<kWide>(from + c, factor, out);
    if (rest == 0) continue;
    for (int64_t k = 0; k < rest; ++k) out[k] = factor * widen(from[whole + k]);
    for (int64_t k = rest; k < kWide; ++k) out[k] = 0;
  }
  for (int64_t c = 0; c < depth; c += kWide)
    std::fill(to + c * rows + count * kWide, to + c * rows + rows * kWide, Real(0));
}

// The same rows transposed: kWide rows beside each other, [rows / kWide][depth][kWide], the operand of score_tile.
template <typename S, typename Row>
void pack_transposed(Row row, int64_t count, int64_t depth, Real* to) {
  for (int64_t i = 0; i < count; i += kWide, to += depth * kWide) {
    const int64_t width = std::min<int64_t>(kWide, count - i);
    const S* from[kWide];
    for (int64_t m = 0; m < kWide; ++m) from[m] = row(i + std::min(m, width - 1));
    int64_t k = 0;
#if defined(__AVX2__)
    if constexpr (std::is_same_v<S, float> && kWide % 8 == 0) {
      for (; k + 8 <= depth; k += 8)
        for (int64_t m = 0; m < kWide; m += 8) transpose_8x8(from + m, k, to + k * kWide + m, kWide);
    }
#endif
    for (; k < depth; ++k)
      for (int64_t m = 0; m < kWide; ++m) to[k * kWide + m] = widen(from[m][k]);
    if (width < kWide)
      for (k = 0; k < depth; ++k) std::fill(to + k * kWide + width, to + (k + 1) * kWide, Real(0));
  }
}

// Panels back into rows of a tensor.
template <typename S>
void unpack_row(const Real* panels, int64_t rows, int64_t i, int64_t depth, Real factor, S* to) {
  for (int64_t c = 0; c < depth; c += kWide, panels += rows * kWide) {
    const int64_t width = std::min<int64_t>(kWide, depth - c);
    across(width, [&](int64_t at, auto cut) { store_lanes(to + c + at, factor * load(panels + i * kWide + at), cut); });
  }
}

}  // namespace turbogr
