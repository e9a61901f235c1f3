// Element-wise vector instructions, in the three forms: first n elements, mask and repeats, and with a scalar.
#pragma once

#include "lanes.h"

namespace AscendC {
namespace twin {

// What an element is computed in: halves are rounded after each instruction.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, half>, float, T>;

template <typename T>
constexpr double CyclesPerRepeat(bool slow) {
  return slow ? (kRepeat / sizeof(T)) / rates::kSlowElements : 1.0;
}

template <typename D, typename S, typename F>
void Unary(const char* name, const LocalTensor<D>& dst, const LocalTensor<S>& src, Shape shape, Stride to, Stride from,
           double cycles, F f) {
  const double all = shape.Rounds(std::max(sizeof(D), sizeof(S))) * cycles;
  Instruction instruction(name, PIPE_V, all);
  Operand<D> d(dst, shape, to, name);
  Operand<S> s(src, shape, from, name);
  CheckOverlap(d, s, sizeof(D) == sizeof(S), name);
  Count(name, NameOf<S>(), shape, all);
  s.Read(instruction);
  d.Write(instruction);
  for (uint32_t r = 0; r < shape.repeats; ++r) {
    for (uint32_t lane = 0; lane < shape.lanes; ++lane) d.At(r, lane) = f(s.At(r, lane));
  }
}

template <typename T, typename F>
void Binary(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, Shape shape,
            const BinaryRepeatParams& p, bool slow, bool readsDst, F f) {
  const double all = shape.Rounds(sizeof(T)) * CyclesPerRepeat<T>(slow);
  Instruction instruction(name, PIPE_V, all);
  Operand<T> d(dst, shape, {p.dstBlkStride, p.dstRepStride}, name);
  Operand<T> x(a, shape, {p.src0BlkStride, p.src0RepStride}, name);
  Operand<T> y(b, shape, {p.src1BlkStride, p.src1RepStride}, name);
  CheckOverlap(d, x, true, name);
  CheckOverlap(d, y, true, name);
  Count(name, NameOf<T>(), shape, all);
  x.Read(instruction);
  y.Read(instruction);
  if (readsDst) d.Read(instruction);
  d.Write(instruction);
  for (uint32_t r = 0; r < shape.repeats; ++r) {
    for (uint32_t lane = 0; lane < shape.lanes; ++lane) {
      d.At(r, lane) = f(Wide<T>(d.At(r, lane)), Wide<T>(x.At(r, lane)), Wide<T>(y.At(r, lane)));
    }
  }
}

// Integers that overflow may wrap or saturate: a control bit says which, and what it is by default on these devices is not
// documented. Products must not overflow. Sums saturate, as a kernel that is told of numbers far out of range may do
// without harm; one that counts on wrapping computes something else here.
template <typename T, typename F>
T Fitting(T a, T b, bool product, F f) {
  if constexpr (std::is_integral_v<T>) {
    const int64_t wide = f(int64_t{a}, int64_t{b});
    const T near = static_cast<T>(std::clamp<int64_t>(wide, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    if (product && wide != near) {
      Fail("integer-overflow", "%lld does not fit an integer of %zu bits", static_cast<long long>(wide), 8 * sizeof(T));
    }
    return near;
  } else {
    return f(a, b);
  }
}

struct AddOf { template <typename T> T operator()(T, T a, T b) const { return Fitting(a, b, false, [](auto x, auto y) { return x + y; }); } };
struct SubOf { template <typename T> T operator()(T, T a, T b) const { return Fitting(a, b, false, [](auto x, auto y) { return x - y; }); } };
struct MulOf { template <typename T> T operator()(T, T a, T b) const { return Fitting(a, b, true, [](auto x, auto y) { return x * y; }); } };
struct MaxOf { template <typename T> T operator()(T, T a, T b) const { return a > b ? a : b; } };
struct MinOf { template <typename T> T operator()(T, T a, T b) const { return a < b ? a : b; } };
struct DivOf { template <typename T> T operator()(T, T a, T b) const { return a / b; } };
struct MulAddDstOf { template <typename T> T operator()(T d, T a, T b) const { return d + a * b; } };
struct FusedMulAddOf { template <typename T> T operator()(T d, T a, T b) const { return d * a + b; } };
struct AndOf { template <typename T> T operator()(T, T a, T b) const { return a & b; } };
struct OrOf { template <typename T> T operator()(T, T a, T b) const { return a | b; } };

template <typename T>
constexpr bool kArithmetic = kOneOf<T, half, float, int16_t, int32_t>;
template <typename T>
constexpr bool kReal = kOneOf<T, half, float>;
template <typename T>
constexpr bool kBits = kOneOf<T, int16_t, uint16_t>;
template <typename T>
constexpr bool kInteger = kOneOf<T, int16_t, uint16_t, int32_t, uint32_t>;

// Elements from their number alone.
template <typename T, typename F>
void Fill(const char* name, const LocalTensor<T>& dst, Shape shape, Stride to, F f) {
  const double cycles = shape.Rounds(sizeof(T));
  Instruction instruction(name, PIPE_V, cycles);
  Operand<T> d(dst, shape, to, name);
  Count(name, NameOf<T>(), shape, cycles);
  d.Write(instruction);
  for (uint32_t r = 0; r < shape.repeats; ++r) {
    for (uint32_t lane = 0; lane < shape.lanes; ++lane) d.At(r, lane) = f(r * shape.lanes + lane);
  }
}

}  // namespace twin

#define TWIN_BINARY(NAME, FUNCTION, TYPES, SLOW, READS_DST)                                                          \
  template <typename T>                                                                                              \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, const int32_t& count) {      \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    twin::Binary(#NAME, dst, a, b, twin::Shape::First(count), {}, SLOW, READS_DST, twin::FUNCTION{});                 \
  }                                                                                                                  \
  template <typename T, bool isSetMask = true>                                                                       \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, uint64_t mask,               \
            const uint8_t repeats, const BinaryRepeatParams& params) {                                               \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    const auto shape = twin::Shape::Repeats(mask, repeats, sizeof(T));                                               \
    twin::Binary(#NAME, dst, a, b, shape, params, SLOW, READS_DST, twin::FUNCTION{});                                 \
  }
TWIN_BINARY(Add, AddOf, kArithmetic, false, false)
TWIN_BINARY(Sub, SubOf, kArithmetic, false, false)
TWIN_BINARY(Mul, MulOf, kArithmetic, false, false)
TWIN_BINARY(Max, MaxOf, kArithmetic, false, false)
TWIN_BINARY(Min, MinOf, kArithmetic, false, false)
TWIN_BINARY(Div, DivOf, kReal, true, false)
TWIN_BINARY(MulAddDst, MulAddDstOf, kReal, true, true)
TWIN_BINARY(FusedMulAdd, FusedMulAddOf, kReal, true, true)
TWIN_BINARY(And, AndOf, kBits, false, false)
TWIN_BINARY(Or, OrOf, kBits, false, false)
#undef TWIN_BINARY

// The scalar has the type of the elements, as with the real headers.
#define TWIN_SCALAR(NAME, EXPRESSION, TYPES)                                                                         \
  template <typename T, bool isSetMask = true>                                                                       \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) {            \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    const twin::Wide<T> s = scalar;                                                                                  \
    twin::Unary(#NAME, dst, src, twin::Shape::First(count), {}, {}, 1.0, [s](twin::Wide<T> x) -> T { return EXPRESSION; }); \
  }                                                                                                                  \
  template <typename T, bool isSetMask = true>                                                                       \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, uint64_t mask,                     \
            const uint8_t repeats, const UnaryRepeatParams& p) {                                                     \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    const twin::Wide<T> s = scalar;                                                                                  \
    const auto shape = twin::Shape::Repeats(mask, repeats, sizeof(T));                                               \
    twin::Unary(#NAME, dst, src, shape, {p.dstBlkStride, p.dstRepStride}, {p.srcBlkStride, p.srcRepStride}, 1.0,      \
                [s](twin::Wide<T> x) -> T { return EXPRESSION; });                                                   \
  }
TWIN_SCALAR(Adds, twin::AddOf{}(x, x, s), kArithmetic)
TWIN_SCALAR(Muls, twin::MulOf{}(x, x, s), kArithmetic)
TWIN_SCALAR(Maxs, x > s ? x : s, kArithmetic)
TWIN_SCALAR(Mins, x < s ? x : s, kArithmetic)
TWIN_SCALAR(ShiftLeft, static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) << s), kInteger)
TWIN_SCALAR(ShiftRight, static_cast<T>(x >> s), kInteger)
#undef TWIN_SCALAR

template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalar, const int32_t& count) {
  static_assert(std::is_same_v<T, U> && twin::kReal<T>, "the twin has Axpy of one type, half or float");
  const twin::Wide<T> s = scalar;
  twin::Binary("Axpy", dst, src, src, twin::Shape::First(count), {}, false, true,
               [s](auto d, auto a, auto) { return d + s * a; });
}

#define TWIN_UNARY(NAME, EXPRESSION, TYPES, SLOW)                                                                    \
  template <typename T>                                                                                              \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {                             \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    twin::Unary(#NAME, dst, src, twin::Shape::First(count), {}, {}, twin::CyclesPerRepeat<T>(SLOW),                   \
                [](twin::Wide<T> x) -> T { return EXPRESSION; });                                                    \
  }                                                                                                                  \
  template <typename T, bool isSetMask = true>                                                                       \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const uint8_t repeats,               \
            const UnaryRepeatParams& p) {                                                                            \
    static_assert(twin::TYPES<T>, #NAME " does not take this type on Ascend 910B");                                   \
    const auto shape = twin::Shape::Repeats(mask, repeats, sizeof(T));                                               \
    twin::Unary(#NAME, dst, src, shape, {p.dstBlkStride, p.dstRepStride}, {p.srcBlkStride, p.srcRepStride},           \
                twin::CyclesPerRepeat<T>(SLOW), [](twin::Wide<T> x) -> T { return EXPRESSION; });                    \
  }
TWIN_UNARY(Exp, std::exp(x), kReal, true)
TWIN_UNARY(Ln, std::log(x), kReal, true)
TWIN_UNARY(Sqrt, std::sqrt(x), kReal, true)
TWIN_UNARY(Abs, std::fabs(x), kReal, false)
TWIN_UNARY(Relu, x > 0 ? x : 0, kReal, false)
// Hardware gives these two to about 11 bits; so does the twin, lest a kernel relies on more.
TWIN_UNARY(Reciprocal, (1.0f / x) * (1.0f + 0x1p-11f), kReal, false)
TWIN_UNARY(Rsqrt, (1.0f / std::sqrt(x)) * (1.0f + 0x1p-11f), kReal, false)
TWIN_UNARY(Not, static_cast<T>(~x), kBits, false)
#undef TWIN_UNARY

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, const int32_t& count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes 16- and 32-bit types on Ascend 910B");
  twin::Fill("Duplicate", dst, twin::Shape::First(count), {}, [&](uint32_t) { return scalar; });
}
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, uint64_t mask, const uint8_t repeats,
               const uint16_t dstBlkStride, const uint8_t dstRepStride) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes 16- and 32-bit types on Ascend 910B");
  const auto shape = twin::Shape::Repeats(mask, repeats, sizeof(T));
  twin::Fill("Duplicate", dst, shape, {dstBlkStride, dstRepStride}, [&](uint32_t) { return scalar; });
}

// Lanes whose bit is set; the others keep what they hold.
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, uint64_t mask[], const uint8_t repeats,
               const uint16_t dstBlkStride, const uint8_t dstRepStride) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes 16- and 32-bit types on Ascend 910B");
  const auto shape = twin::Shape::Repeats(twin::kRepeat / sizeof(T), repeats, sizeof(T));
  twin::Instruction instruction("Duplicate", PIPE_V, repeats);
  twin::Count("Duplicate", twin::NameOf<T>(), shape, repeats);
  twin::Chosen<T> d(dst, mask, repeats, {dstBlkStride, dstRepStride}, "Duplicate");
  d.Write(instruction);
  d.ForLanes([&](uint32_t, uint32_t, T& to) { to = scalar; });
}

template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& first, uint32_t count) {
  static_assert(twin::kArithmetic<T>, "CreateVecIndex does not take this type on Ascend 910B");
  twin::Fill("CreateVecIndex", dst, twin::Shape::First(count), {},
             [&](uint32_t i) -> T { return static_cast<T>(twin::Wide<T>(first) + static_cast<twin::Wide<T>>(i)); });
}

struct CopyRepeatParams {
  CopyRepeatParams() = default;
  CopyRepeatParams(uint16_t dstStride, uint16_t srcStride, uint16_t dstRepeatSize, uint16_t srcRepeatSize)
      : dstStride(dstStride), srcStride(srcStride), dstRepeatSize(dstRepeatSize), srcRepeatSize(srcRepeatSize) {}
  uint16_t dstStride = 1, srcStride = 1, dstRepeatSize = 8, srcRepeatSize = 8;
};

template <typename T, bool isSetMask = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask, const uint8_t repeats,
          const CopyRepeatParams& p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Copy takes 16- and 32-bit types");
  const auto shape = twin::Shape::Repeats(mask, repeats, sizeof(T));
  twin::Unary("Copy", dst, src, shape, {p.dstStride, p.dstRepeatSize}, {p.srcStride, p.srcRepeatSize}, 1.0,
              [](T x) { return x; });
}

// Lanes whose bit is set; the others keep what they hold.
template <typename T, bool isSetMask = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const uint8_t repeats,
          const CopyRepeatParams& p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Copy takes 16- and 32-bit types");
  const auto shape = twin::Shape::Repeats(twin::kRepeat / sizeof(T), repeats, sizeof(T));
  twin::Instruction instruction("Copy", PIPE_V, repeats);
  twin::Count("Copy", twin::NameOf<T>(), shape, repeats);
  twin::Chosen<T> d(dst, mask, repeats, {p.dstStride, p.dstRepeatSize}, "Copy");
  twin::Chosen<T> s(src, mask, repeats, {p.srcStride, p.srcRepeatSize}, "Copy");
  s.Read(instruction);
  d.Write(instruction);
  d.ForLanes([&](uint32_t repeat, uint32_t lane, T& to) { to = s.At(repeat, lane); });
}

struct BrcbRepeatParams {
  BrcbRepeatParams() = default;
  BrcbRepeatParams(uint16_t dstBlkStride, uint16_t dstRepStride) : dstBlkStride(dstBlkStride), dstRepStride(dstRepStride) {}
  uint32_t dstBlkStride = 1, dstRepStride = 8;
};

// Each of eight elements fills a block of 32 bytes.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeats, const BrcbRepeatParams& p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes 16- and 32-bit types");
  const uint32_t perBlock = twin::kBlock / sizeof(T);
  const auto from = twin::Shape::First(8 * repeats);
  const auto to = twin::Shape::Repeats(8 * perBlock, repeats, sizeof(T));
  const double cycles = from.lanes / twin::rates::kBroadcastElements;
  twin::Instruction instruction("Brcb", PIPE_V, cycles);
  twin::Operand<T> s(src, from, {}, "Brcb");
  twin::Operand<T> d(dst, to, {p.dstBlkStride, p.dstRepStride}, "Brcb");
  twin::CheckOverlap(d, s, false, "Brcb");
  twin::Count("Brcb", twin::NameOf<T>(), from, cycles);
  s.Read(instruction);
  d.Write(instruction);
  for (uint32_t r = 0; r < repeats; ++r) {
    for (uint32_t lane = 0; lane < to.lanes; ++lane) d.At(r, lane) = s.Base()[r * 8 + lane / perBlock];
  }
}

}  // namespace AscendC
