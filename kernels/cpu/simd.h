// Vectors as wide as the machine's, in the compiler's own notation: one source for AVX-512, AVX2, NEON and plain C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TURBOGR_INLINE inline __attribute__((always_inline))
#define TURBOGR_APART __attribute__((noinline))  // what few calls need stays out of the way of what most need

namespace turbogr {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

// Integers of the same size: what comparisons give, and what `mask ? a : b` selects by.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <typename T>
TURBOGR_INLINE Vector<T> load(const T* from) {
  Vector<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <typename T>
TURBOGR_INLINE void store(T* to, Vector<T> x) {
  std::memcpy(to, &x, sizeof x);
}

// A store past the caches, for what is larger than they are; `to` is aligned to the vector. The thread that made such
// stores calls stream_end before another one reads.
template <typename T>
TURBOGR_INLINE void stream(T* to, Vector<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, (__m512i)x);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)to, (__m256i)x);
#else
  store(to, x);
#endif
}

TURBOGR_INLINE void stream_end() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <typename T>
TURBOGR_INLINE Vector<T> broadcast(T x) {
  return x - Vector<T>{};  // the subtraction folds away; adding zero would not: it loses the sign of -0
}

template <typename T>
TURBOGR_INLINE Vector<T> zeros() {
  return Vector<T>{};
}

// 0, 1, 2, ...
template <typename T>
TURBOGR_INLINE Vector<T> iota() {
  Vector<T> x;
  for (int lane = 0; lane < kLanes<T>; ++lane) x[lane] = T(lane);
  return x;
}

template <typename T, typename V = Vector<T>>
TURBOGR_INLINE V as(Vector<Bits<T>> x) {
  V y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <typename T>
TURBOGR_INLINE Vector<Bits<T>> bits(Vector<T> x) {
  Vector<Bits<T>> y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// The upper half of the lanes onto the lower half, again and again: the same order on every machine of one width.
template <typename T, typename Combine>
TURBOGR_INLINE T fold(Vector<T> x, Combine combine) {
  T lanes[kLanes<T>];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

template <typename T>
TURBOGR_INLINE T sum(Vector<T> x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
#endif
  return fold<T>(x, [](T a, T b) { return a + b; });
}

// Of numbers; which lane a NaN beats is not said.
template <typename T>
TURBOGR_INLINE T maximum(Vector<T> x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
#endif
  return fold<T>(x, [](T a, T b) { return a > b ? a : b; });
}

// The second operand where either is NaN, as the machine instructions do; compilers do not find those by themselves.
#if defined(__AVX512F__)
TURBOGR_INLINE Vector<float> larger(Vector<float> x, Vector<float> y) { return _mm512_max_ps(x, y); }
TURBOGR_INLINE Vector<float> smaller(Vector<float> x, Vector<float> y) { return _mm512_min_ps(x, y); }
#elif defined(__AVX2__)
TURBOGR_INLINE Vector<float> larger(Vector<float> x, Vector<float> y) { return _mm256_max_ps(x, y); }
TURBOGR_INLINE Vector<float> smaller(Vector<float> x, Vector<float> y) { return _mm256_min_ps(x, y); }
#else
TURBOGR_INLINE Vector<float> larger(Vector<float> x, Vector<float> y) { return x > y ? x : y; }
TURBOGR_INLINE Vector<float> smaller(Vector<float> x, Vector<float> y) { return x < y ? x : y; }
#endif
TURBOGR_INLINE Vector<double> larger(Vector<double> x, Vector<double> y) { return x > y ? x : y; }
TURBOGR_INLINE Vector<double> smaller(Vector<double> x, Vector<double> y) { return x < y ? x : y; }

// e^x to 3e-7; NaN stays NaN. Results are kept within [2^-126, 2^127]: what is smaller or larger than that is for the
// caller to treat.
TURBOGR_INLINE Vector<float> exp(Vector<float> x) {
  x = larger(broadcast(-87.0f), smaller(broadcast(88.0f), x));
  // x log₂ e = n + f. Adding 1.5 · 2^23 leaves n in the low bits of the mantissa, rounded to nearest.
  const float shift = 12582912.0f, turns = 1.44269504f;
  const Vector<float> shifted = x * turns + shift;
  const Vector<float> f = x * turns - (shifted - shift);
  // 2^f for |f| <= 1/2: the polynomial of degree 5 with the least relative error, 8e-8.
  Vector<float> p = f * 1.32764725e-3f + 9.67554189e-3f;
  p = p * f + 5.55071309e-2f;
  p = p * f + 2.40221202e-1f;
  p = p * f + 6.93146944e-1f;
  p = p * f + 1.00000012f;
  return as<float>(bits<float>(p) + (bits<float>(shifted) << 23));
}

TURBOGR_INLINE Vector<double> exp(Vector<double> x) {
  Vector<double> y;
  for (int lane = 0; lane < kLanes<double>; ++lane) y[lane] = std::exp(x[lane]);
  return y;
}

// e^x, and exactly 0 where that is below the smallest normal number.
TURBOGR_INLINE Vector<float> exp_or_zero(Vector<float> x) { return x < -87.0f ? Vector<float>{} : exp(x); }
TURBOGR_INLINE Vector<double> exp_or_zero(Vector<double> x) { return exp(x); }

// log(1 + x) for x within [0, 1], with full relative precision: the series of 2 atanh(x / (2 + x)).
TURBOGR_INLINE Vector<float> log_one_plus(Vector<float> x) {
  const Vector<float> z = x / (x + 2.0f), y = z * z;
  Vector<float> p = y * (2.0f / 15) + 2.0f / 13;
  p = p * y + 2.0f / 11;
  p = p * y + 2.0f / 9;
  p = p * y + 2.0f / 7;
  p = p * y + 2.0f / 5;
  p = p * y + 2.0f / 3;
  return (p * y + 2.0f) * z;
}

TURBOGR_INLINE Vector<double> log_one_plus(Vector<double> x) {
  Vector<double> y;
  for (int lane = 0; lane < kLanes<double>; ++lane) y[lane] = std::log1p(x[lane]);
  return y;
}

// Two neighbouring numbers, again and again.
TURBOGR_INLINE Vector<float> load_pair(const float* from) {
  int64_t both;
  std::memcpy(&both, from, sizeof both);
  return (Vector<float>)broadcast(both);
}

TURBOGR_INLINE Vector<double> load_pair(const double* from) {
#if defined(__AVX512F__)
  return _mm512_castps_pd(_mm512_broadcast_f32x4(_mm_loadu_ps((const float*)from)));
#elif defined(__AVX2__)
  return _mm256_broadcast_pd((const __m128d*)from);
#else
  return load(from);
#endif
}

// Sums of neighbouring lanes, first those of x, then those of y.
template <typename T>
TURBOGR_INLINE Vector<T> pair_sums(Vector<T> x, Vector<T> y) {
#if defined(__AVX512F__)
  const Vector<Bits<T>> even = 2 * iota<Bits<T>>(), odd = even + 1;
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_permutex2var_ps(x, (__m512i)even, y) + _mm512_permutex2var_ps(x, (__m512i)odd, y);
  } else {
    return _mm512_permutex2var_pd(x, (__m512i)even, y) + _mm512_permutex2var_pd(x, (__m512i)odd, y);
  }
#elif defined(__AVX2__)
  // Sums come in quarters of x, y, x, y.
  if constexpr (std::is_same_v<T, float>) {
    return (Vector<T>)_mm256_permute4x64_pd((__m256d)_mm256_hadd_ps(x, y), 0xd8);
  } else {
    return _mm256_permute4x64_pd(_mm256_hadd_pd(x, y), 0xd8);
  }
#else
  constexpr int half = kLanes<T> / 2;
  Vector<T> sums;
  for (int lane = 0; lane < half; ++lane) {
    sums[lane] = x[2 * lane] + x[2 * lane + 1];
    sums[half + lane] = y[2 * lane] + y[2 * lane + 1];
  }
  return sums;
#endif
}

#if defined(__AVX2__)
// to[j * pitch + i] = from[i][at + j] for i, j below 8.
TURBOGR_INLINE void transpose_8x8(const float* const* from, int64_t at, float* to, int64_t pitch) {
  __m256 row[8], half[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from[i] + at);
  for (int i = 0; i < 8; i += 2) {
    half[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    half[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      row[i + 2 * j] = _mm256_shuffle_ps(half[i + j], half[i + 2 + j], 0x44);
      row[i + 2 * j + 1] = _mm256_shuffle_ps(half[i + j], half[i + 2 + j], 0xee);
    }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(to + j * pitch, _mm256_permute2f128_ps(row[j], row[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * pitch, _mm256_permute2f128_ps(row[j], row[j + 4], 0x31));
  }
}
#endif

template <typename T>
TURBOGR_INLINE Vector<T> sigmoid(Vector<T> x) {
  return T(1) / (T(1) + exp(-x));
}

// e^-x, infinite where e^x is below the smallest normal number: there a sigmoid is exactly 0, and so is its product with
// -1e38, which a mask may have left.
TURBOGR_INLINE Vector<float> exp_minus(Vector<float> x) {
  return x < -87.0f ? broadcast(__builtin_inff()) : exp(-x);
}
TURBOGR_INLINE Vector<double> exp_minus(Vector<double> x) { return exp(-x); }

// To a relative error of 3e-7; NaN stays NaN.
TURBOGR_INLINE Vector<float> tanh(Vector<float> x) {
  const Vector<int32_t> sign = bits<float>(x) & INT32_MIN;
  const Vector<float> size = as<float>(bits<float>(x) ^ sign), y = x * x;
  // Up to 0.7, where 1 - 2 / (e^2x + 1) would lose digits: x + x^3 times the polynomial with the least relative error.
  Vector<float> p = y * -5.13866218e-3f + 2.00919695e-2f;
  p = p * y - 5.35588600e-2f;
  p = p * y + 1.33291110e-1f;
  p = p * y - 3.33331913e-1f;
  const Vector<float> far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return size < 0.7f ? p * y * x + x : as<float>(bits<float>(far) | sign);
}

TURBOGR_INLINE Vector<double> tanh(Vector<double> x) {
  Vector<double> y;
  for (int lane = 0; lane < kLanes<double>; ++lane) y[lane] = std::tanh(x[lane]);
  return y;
}

}  // namespace turbogr
