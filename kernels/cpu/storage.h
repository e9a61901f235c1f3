// Numbers as they lie in memory. Arithmetic is in Real: float for tensors of 32 and 16 bits, double for tests.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

// Three libraries are made of these sources: TURBOGR_REAL is float or double, and TURBOGR_HALVES adds tensors of 16
// bits, which most programs do without: they take twice as long to compile.
#ifndef TURBOGR_REAL
#define TURBOGR_REAL float
#endif

namespace turbogr {

using Real = TURBOGR_REAL;

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// Codes of dtypes, in the order of kernels/cpu/call.py.
enum Type : int64_t { kFloat = 0, kDouble = 1, kHalf = 2, kBFloat = 3 };

TURBOGR_INLINE uint32_t float_bits(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

TURBOGR_INLINE float bits_float(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

TURBOGR_INLINE float widen(BFloat x) { return bits_float(uint32_t(x.bits) << 16); }

// To nearest, ties to even.
TURBOGR_INLINE BFloat to_bfloat(float x) {
  const uint32_t b = float_bits(x);
  if ((b & 0x7fffffff) > 0x7f800000) return {uint16_t((b >> 16) | 0x40)};  // NaN stays NaN
  return {uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}

#if defined(__F16C__)
TURBOGR_INLINE float widen(Half x) { return _cvtsh_ss(x.bits); }
TURBOGR_INLINE Half to_half(float x) { return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }
#elif defined(__aarch64__)
TURBOGR_INLINE float widen(Half x) {
  __fp16 h;
  std::memcpy(&h, &x, 2);
  return float(h);
}
TURBOGR_INLINE Half to_half(float x) {
  const __fp16 h = __fp16(x);
  Half y;
  std::memcpy(&y, &h, 2);
  return y;
}
#else
TURBOGR_INLINE float widen(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | ((rest & 0x3ff) << 13));  // infinite or NaN
  // As a float with the exponent of 2^-112 too little; multiplying sets that right, subnormals included.
  return bits_float(sign) + bits_float(sign | (rest << 13)) * 5.192296858534828e33f;
}
TURBOGR_INLINE Half to_half(float x) {
  const uint32_t b = float_bits(x), sign = (b >> 16) & 0x8000, size = b & 0x7fffffff;
  if (size > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (size >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (size < 0x38800000) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
    return {uint16_t(sign | (float_bits(bits_float(size) + 0.5f) - 0x3f000000))};
  }
  return {uint16_t(sign | ((size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13))};
}
#endif

TURBOGR_INLINE float widen(float x) { return x; }
TURBOGR_INLINE double widen(double x) { return x; }

TURBOGR_INLINE void narrow(float x, float* to) { *to = x; }
TURBOGR_INLINE void narrow(double x, double* to) { *to = x; }
TURBOGR_INLINE void narrow(float x, Half* to) { *to = to_half(x); }
TURBOGR_INLINE void narrow(float x, BFloat* to) { *to = to_bfloat(x); }

// `count` numbers into Real.
template <typename S>
TURBOGR_INLINE void widen_row(const S* from, Real* to, int64_t count) {
  if constexpr (std::is_same_v<S, Real>) {
    std::memcpy(to, from, size_t(count) * sizeof(Real));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
  }
}

template <typename S>
TURBOGR_INLINE void narrow_row(const Real* from, S* to, int64_t count) {
  if constexpr (std::is_same_v<S, Real>) {
    std::memcpy(to, from, size_t(count) * sizeof(Real));
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(from[i], to + i);
  }
}

// Calls body with a null pointer of the storage type; false when this library does not compute in its Real.
template <typename Body>
bool with_storage(int64_t type, Body body) {
  if constexpr (std::is_same_v<Real, double>) {
    if (type != kDouble) return false;
    body((double*)nullptr);
  } else {
    switch (type) {
      case kFloat:
        body((float*)nullptr);
        break;
#if defined(TURBOGR_HALVES)
      case kHalf:
        body((Half*)nullptr);
        break;
      case kBFloat:
        body((BFloat*)nullptr);
        break;
#endif
      default:
        return false;
    }
  }
  return true;
}

}  // namespace turbogr
