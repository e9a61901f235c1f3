// A copy of a table in FP16 that follows the rows which change.
#pragma once

#include <limits>

#include "rowwise.h"

namespace turbogr {

struct HalfCopy {
  Half* halves;      // one row behind the other
  float* scales;     // of blocks
  int8_t* sizes;     // of rows: the power of two that each would have alone
  uint8_t* changed;  // of blocks, zero: whether a row in it has another size than before
};

constexpr int64_t kRowsAhead = 8;

// All of a row that lies anywhere.
template <typename S>
TURBOGR_INLINE void prefetch_row(const S* row, int64_t depth) {
  constexpr int64_t line = 64 / int64_t(sizeof(S)), most = 16 * line;
  for (int64_t at = 0; at < std::min(depth, most); at += line) __builtin_prefetch(row + at);
}

#if defined(TURBOGR_HALVES)

constexpr int kLeastSize = -100, kSizeOfZero = -128;

// The power of two that is the least one to leave all finite numbers below 2^15; not below 2^-100, so that it has an
// inverse. kSizeOfZero for zeros, whose scale is 1.
inline int size_for(float most) {
  const int exponent = int(float_bits(most) >> 23) - 126;  // numbers too small for one have a size below the least
  return most == 0 ? kSizeOfZero : std::max(exponent - 15, kLeastSize);
}

TURBOGR_INLINE float largest_of(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return maximum<Real>(x);
#endif
}

inline float scale_of(int size) { return size == kSizeOfZero ? 1.0f : std::ldexp(1.0f, size); }

TURBOGR_INLINE Lanes largest_finite(const Real* row, int64_t depth, Lanes most) {
  const float infinite = std::numeric_limits<float>::infinity();
  across(depth, [&](int64_t at, auto cut) {
    const Lanes x = load_lanes(row + at, cut), size = x < 0.0f ? -x : x;
    most = larger(size < infinite ? size : Lanes{}, most);
  });
  return most;
}

TURBOGR_INLINE void narrow_row(const Real* row, int64_t depth, Lanes inverse, Half* to) {
  across(depth, [&](int64_t at, auto cut) { store_lanes(to + at, load_lanes(row + at, cut) * inverse, cut); });
}

// Past the caches, where rows of the copy are whole vectors: nobody reads them before the next step.
TURBOGR_INLINE void stream_row(const Real* row, int64_t depth, Lanes inverse, Half* to) {
#if defined(__AVX512F__)
  if (depth % kWidth == 0 && uintptr_t(to) % 32 == 0) {
    for (int64_t at = 0; at < depth; at += kWidth)
      _mm256_stream_si256((__m256i*)(to + at),
                          _mm512_cvtps_ph((__m512)(load(row + at) * inverse), _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  narrow_row(row, depth, inverse, to);
}

// A row by the scale that its block has. Where that changes, the block is narrowed again afterwards (scale_changed).
TURBOGR_INLINE void follow_row(const HalfCopy& copy, int64_t row, int64_t block, const Real* from, int64_t depth) {
  const int8_t size = int8_t(size_for(largest_of(largest_finite(from, depth, Lanes{}))));
  if (size != copy.sizes[row]) {
    copy.sizes[row] = size;
    __atomic_store_n(copy.changed + row / block, 1, __ATOMIC_RELAXED);
  }
  stream_row(from, depth, broadcast(1 / copy.scales[row / block]), copy.halves + row * depth);
}

inline void scale_block(const HalfCopy& copy, int64_t first, int64_t last, int64_t block, const Real* table,
                        int64_t stride, int64_t depth) {
  const float scale = scale_of(*std::max_element(copy.sizes + first, copy.sizes + last));
  copy.scales[block] = scale;
  for (int64_t i = first; i < last; ++i)
    narrow_row(table + i * stride, depth, broadcast(1 / scale), copy.halves + i * depth);
}

// After all rows were followed.
inline void scale_changed(const HalfCopy& copy, int64_t total, int64_t block, const Real* table, int64_t stride,
                          int64_t depth, int64_t threads) {
  constexpr int64_t some = 64;  // blocks that are worth a thread's trip, most of which have not changed
  for_rows((total + block - 1) / block, some, threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * block, last = std::min(first + block, total);
      if (copy.changed[b] && scale_of(*std::max_element(copy.sizes + first, copy.sizes + last)) != copy.scales[b])
        scale_block(copy, first, last, b, table, stride, depth);
    }
  });
}

#endif

}  // namespace turbogr
