// Passes over rows: rows shared among threads in chunks, each row cut into vectors of Real whatever its storage.
#pragma once

#include <algorithm>

#include "storage.h"
#include "threads.h"

namespace turbogr {

using Lanes = Vector<Real>;
constexpr int64_t kWidth = kLanes<Real>;

// A vector's worth of numbers, or what is left of a row.
struct Whole {};
struct Part {
  int64_t count;
};

// each(at, Whole or Part) for a row of `width` numbers.
template <typename Each>
TURBOGR_INLINE void across(int64_t width, Each each) {
  int64_t at = 0;
  for (; at + kWidth <= width; at += kWidth) each(at, Whole{});
  if (at < width) each(at, Part{width - at});
}

// The sum of term(at, cut) over a row: four partial sums, so that additions do not wait for each other.
template <typename Term>
TURBOGR_INLINE Real total(int64_t width, Term term) {
  Lanes sums[4] = {};
  int64_t at = 0;
  for (; at + 4 * kWidth <= width; at += 4 * kWidth)
    for (int i = 0; i < 4; ++i) sums[i] += term(at + i * kWidth, Whole{});
  for (; at + kWidth <= width; at += kWidth) sums[0] += term(at, Whole{});
  if (at < width) sums[1] += term(at, Part{width - at});
  return sum<Real>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// --- between storage and Real ---

TURBOGR_INLINE Vector<float> widen_lanes(const Half* from) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  float all[kLanes<float>];
  for (int lane = 0; lane < kLanes<float>; ++lane) all[lane] = widen(from[lane]);
  return load(all);
#endif
}

TURBOGR_INLINE void narrow_lanes(Vector<float> x, Half* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < kLanes<float>; ++lane) narrow(x[lane], to + lane);
#endif
}

typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

TURBOGR_INLINE Vector<float> widen_lanes(const BFloat* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Vector<float>)(__builtin_convertvector(halves, Vector<uint32_t>) << 16);
}

TURBOGR_INLINE void narrow_lanes(Vector<float> x, BFloat* to) {
  const Vector<uint32_t> b = (Vector<uint32_t>)x, nan = (b >> 16) | 0x40;
  const Vector<uint32_t> nearest = (b + 0x7fff + ((b >> 16) & 1)) >> 16;  // ties to even, as to_bfloat does
  const Halves halves = __builtin_convertvector((b & 0x7fffffff) > 0x7f800000 ? nan : nearest, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

template <typename S>
TURBOGR_INLINE Lanes load_lanes(const S* from, Whole) {
  if constexpr (std::is_same_v<S, Real>) {
    return load(from);
  } else {
    return widen_lanes(from);
  }
}

template <typename S>
TURBOGR_INLINE void store_lanes(S* to, Lanes x, Whole) {
  if constexpr (std::is_same_v<S, Real>) {
    store(to, x);
  } else {
    narrow_lanes(x, to);
  }
}

// Lanes behind the end are zero.
template <typename S>
TURBOGR_INLINE Lanes load_lanes(const S* from, Part part) {
  Real all[kWidth] = {};
  for (int64_t lane = 0; lane < part.count; ++lane) all[lane] = widen(from[lane]);
  return load(all);
}

template <typename S>
TURBOGR_INLINE void store_lanes(S* to, Lanes x, Part part) {
  Real all[kWidth];
  store(all, x);
  for (int64_t lane = 0; lane < part.count; ++lane) narrow(all[lane], to + lane);
}

// x, with another number in the lanes behind the end.
TURBOGR_INLINE Lanes kept(Lanes x, Whole, Real = 0) { return x; }
TURBOGR_INLINE Lanes kept(Lanes x, Part part, Real other = 0) {
  for (int64_t lane = part.count; lane < kWidth; ++lane) x[lane] = other;
  return x;
}

// Calls body with a null pointer of the storage type.
template <typename Body>
const char* for_storage(int64_t type, Body body) {
  return with_storage(type, body) ? nullptr : failure("no kernel for dtype %lld", (long long)type);
}

// --- rows ---

constexpr int64_t kChunk = 16384;  // numbers that are worth a thread's trip

inline int64_t rows_per_chunk(int64_t width) { return std::max<int64_t>(1, kChunk / std::max<int64_t>(1, width)); }

// Asks for the row some rows behind this one. The machine foresees rows that follow each other, but not slices.
template <typename S>
TURBOGR_INLINE void prefetch_ahead(const S* row, int64_t stride, int64_t width) {
  constexpr int64_t ahead = 4, line = 64 / int64_t(sizeof(S)), most = 16 * line;
  if (stride == width) return;
  for (int64_t at = 0; at < std::min(width, most); at += line) __builtin_prefetch(row + ahead * stride + at);
}

// body(first row, past the last row) for all rows.
template <typename Body>
void for_rows(int64_t rows, int64_t per_chunk, int64_t threads, Body body) {
  parallel_for((rows + per_chunk - 1) / per_chunk, threads,
               [&](int64_t chunk) { body(chunk * per_chunk, std::min(rows, (chunk + 1) * per_chunk)); });
}

}  // namespace turbogr
