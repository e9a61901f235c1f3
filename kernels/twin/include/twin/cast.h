// Conversions that Ascend 910B has; any other pair of types, or rounding mode, is an error.
#pragma once

#include "elementwise.h"

namespace AscendC {

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

namespace twin {

template <typename D, typename S>
constexpr bool kCast =
    (kOneOf<S, half> && kOneOf<D, float, int8_t, uint8_t, int16_t, int32_t>) ||
    (kOneOf<S, float> && kOneOf<D, float, half, bfloat16_t, int16_t, int32_t, int64_t>) ||
    (kOneOf<S, bfloat16_t> && kOneOf<D, float, int32_t>) || (kOneOf<S, int8_t, uint8_t> && kOneOf<D, half>) ||
    (kOneOf<S, int16_t> && kOneOf<D, half, float>) || (kOneOf<S, int32_t> && kOneOf<D, float, int16_t, int64_t>) ||
    (kOneOf<S, int64_t> && kOneOf<D, int32_t, float>);

// Exact conversions, and those where the unit chooses to nearest, need no mode; the others must say how to round.
template <typename D, typename S>
bool MayBeNone() {
  if (kOneOf<S, float> && kOneOf<D, bfloat16_t, int16_t, int32_t, int64_t>) return false;
  if (kOneOf<S, half, bfloat16_t> && kOneOf<D, int16_t, int32_t>) return false;
  if (kOneOf<S, int64_t> && kOneOf<D, float>) return false;
  return true;
}

inline double Rounded(double x, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR: return std::floor(x);
    case RoundMode::CAST_CEIL: return std::ceil(x);
    case RoundMode::CAST_ROUND: return std::round(x);
    case RoundMode::CAST_TRUNC: return std::trunc(x);
    default: return std::nearbyint(x);
  }
}

template <typename D, typename S>
D Converted(S x, RoundMode mode) {
  if constexpr (kOneOf<D, half, bfloat16_t>) {
    return D(static_cast<float>(x));
  } else if constexpr (std::is_integral_v<D>) {
    if constexpr (std::is_integral_v<S>) {
      constexpr S low = sizeof(S) > sizeof(D) ? S(std::numeric_limits<D>::min()) : std::numeric_limits<S>::min();
      constexpr S high = sizeof(S) > sizeof(D) ? S(std::numeric_limits<D>::max()) : std::numeric_limits<S>::max();
      return static_cast<D>(x < low ? low : x > high ? high : x);
    } else {
      const double rounded = Rounded(static_cast<float>(x), mode);
      if (std::isnan(rounded)) return 0;
      const double low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
      return rounded <= low ? std::numeric_limits<D>::min()
                            : rounded >= high ? std::numeric_limits<D>::max() : static_cast<D>(rounded);
    }
  } else {
    return static_cast<D>(x);
  }
}

template <typename D, typename S>
void CastAs(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, Shape shape, Stride to, Stride from) {
  static_assert(kCast<D, S>, "Ascend 910B has no conversion between these types");
  if (mode == RoundMode::CAST_NONE && !MayBeNone<D, S>()) {
    Fail("cast-mode", "Cast from %s to %s needs a rounding mode", NameOf<S>(), NameOf<D>());
  }
  if (kOneOf<D, half, bfloat16_t> && mode != RoundMode::CAST_NONE && mode != RoundMode::CAST_RINT) {
    Fail("cast-mode", "the twin rounds to %s to nearest even only", NameOf<D>());
  }
  const size_t width = std::max(sizeof(D), sizeof(S));
  const double rate = sizeof(D) == 8 ? rates::kCastElements / 2 : rates::kCastElements;
  Unary("Cast", dst, src, shape, to, from, kRepeat / width / rate, [mode](S x) { return Converted<D>(x, mode); });
}

}  // namespace twin

template <typename D, typename S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, const uint32_t count) {
  twin::CastAs(dst, src, mode, twin::Shape::First(count), {}, {});
}

// The mask counts elements of the wider type.
template <typename D, typename S, bool isSetMask = true>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, const uint64_t mask,
          const uint8_t repeats, const UnaryRepeatParams& p) {
  const auto shape = twin::Shape::Repeats(mask, repeats, std::max(sizeof(D), sizeof(S)));
  twin::CastAs(dst, src, mode, shape, {p.dstBlkStride, p.dstRepStride}, {p.srcBlkStride, p.srcRepStride});
}

}  // namespace AscendC
