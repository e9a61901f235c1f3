// Numbers of two bytes, as the vector and cube units round them: to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace AscendC::twin {

template <typename To, typename From>
inline To BitsOf(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t HalfFromFloat(float value) {
  const uint32_t bits = BitsOf<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                       // below the smallest normal number: adding 0.5 aligns the bits
    return sign | (BitsOf<uint32_t>(BitsOf<float>(magnitude) + 0.5f) - 0x3f000000);
  }
  return sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline float FloatFromHalf(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
  if (rest >= 0x0f800000) return BitsOf<float>(sign | 0x7f800000 | (rest & 0x7fffff));
  const float scaled = BitsOf<float>(rest) * 0x1p112f;
  return BitsOf<float>(sign | BitsOf<uint32_t>(scaled));
}

inline uint16_t BFloatFromFloat(float value) {
  const uint32_t bits = BitsOf<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace AscendC::twin

struct half {
  uint16_t bits = 0;
  half() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  half(T value) : bits(AscendC::twin::HalfFromFloat(static_cast<float>(value))) {}
  operator float() const { return AscendC::twin::FloatFromHalf(bits); }
};

struct bfloat16_t {
  uint16_t bits = 0;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(AscendC::twin::BFloatFromFloat(value)) {}
  explicit operator float() const { return AscendC::twin::BitsOf<float>(uint32_t{bits} << 16); }
};

namespace AscendC {

inline bfloat16_t ToBfloat16(float value) { return bfloat16_t(value); }
inline float ToFloat(bfloat16_t value) { return static_cast<float>(value); }

template <typename A, typename B>
struct IsSameType : std::is_same<A, B> {};

namespace twin {

template <typename T>
constexpr const char* NameOf() {
  if constexpr (std::is_same_v<T, float>) return "float";
  if constexpr (std::is_same_v<T, half>) return "half";
  if constexpr (std::is_same_v<T, bfloat16_t>) return "bfloat16";
  if constexpr (std::is_integral_v<T>) {
    constexpr const char* names[2][4] = {{"uint8", "uint16", "uint32", "uint64"}, {"int8", "int16", "int32", "int64"}};
    constexpr int size = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return names[std::is_signed_v<T>][size];
  }
  return "?";
}

template <typename T, typename... Allowed>
constexpr bool kOneOf = (std::is_same_v<T, Allowed> || ...);

}  // namespace twin
}  // namespace AscendC
