// Comparisons into packed bits, selection by them, and gathering within the unified buffer.
#pragma once

#include "cast.h"

namespace AscendC {

enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

namespace twin {

template <typename T>
bool Holds(CMPMODE mode, T a, T b) {
  switch (mode) {
    case CMPMODE::LT: return a < b;
    case CMPMODE::GT: return a > b;
    case CMPMODE::EQ: return a == b;
    case CMPMODE::LE: return a <= b;
    case CMPMODE::GE: return a >= b;
    default: return a != b;
  }
}

template <typename T, typename F>
void CompareWith(const char* name, const LocalTensor<uint8_t>& dst, const LocalTensor<T>& a, const LocalTensor<T>* b,
                 CMPMODE mode, uint32_t count, F other) {
  static_assert(kOneOf<T, half, float, int32_t>, "comparisons take half, float and int32 on Ascend 910B");
  if (std::is_same_v<T, int32_t> && mode != CMPMODE::EQ) Fail("compare-mode", "%s of int32 has EQ only", name);
  if (count * sizeof(T) % kRepeat) {
    Fail("compare-tail", "%s of %u elements: bytes must be a multiple of 256, or the tail is not computed", name, count);
  }
  const auto shape = Shape::First(count);
  const double cycles = shape.Rounds(sizeof(T));
  Instruction instruction(name, PIPE_V, cycles);
  Operand<uint8_t> d(dst, Shape::First(count / 8), {}, name);
  Operand<T> x(a, shape, {}, name);
  Count(name, NameOf<T>(), shape, cycles);
  x.Read(instruction);
  if (b) Operand<T>(*b, shape, {}, name).Read(instruction);
  d.Write(instruction);
  CheckOverlap(d, x, false, name);
  for (uint32_t i = 0; i < count; i += 8) {
    uint8_t bits = 0;
    for (uint32_t j = 0; j < 8; ++j) bits |= Holds<Wide<T>>(mode, x.Base()[i + j], other(i + j)) << j;
    d.Base()[i / 8] = bits;
  }
}

template <typename T, typename F>
void SelectWith(const LocalTensor<T>& dst, const LocalTensor<uint8_t>& mask, const LocalTensor<T>& a,
                const LocalTensor<T>* b, bool repeated, uint32_t count, F other) {
  static_assert(kReal<T>, "Select takes half and float");
  const auto shape = Shape::First(count);
  const double cycles = shape.Rounds(sizeof(T));
  Instruction instruction("Select", PIPE_V, cycles);
  const uint32_t period = repeated ? kRepeat / sizeof(T) : count;
  Operand<uint8_t> m(mask, Shape::First((std::min(period, count) + 7) / 8), {}, "Select");
  Operand<T> d(dst, shape, {}, "Select");
  Operand<T> x(a, shape, {}, "Select");
  CheckOverlap(d, x, true, "Select");
  Count("Select", NameOf<T>(), shape, cycles);
  m.Read(instruction);
  x.Read(instruction);
  if (b) Operand<T>(*b, shape, {}, "Select").Read(instruction);
  d.Write(instruction);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bit = i % period;
    d.Base()[i] = m.Base()[bit / 8] >> (bit % 8) & 1 ? x.Base()[i] : other(i);
  }
}

}  // namespace twin

template <typename T, typename U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, CMPMODE mode, uint32_t count) {
  static_assert(std::is_same_v<U, uint8_t>, "Compare gives bits in uint8");
  twin::CompareWith("Compare", dst, a, &b, mode, count, [&](uint32_t i) {
    return twin::Wide<T>(reinterpret_cast<T*>(twin::Me().ub.At(b.Offset()))[i]);
  });
}

// Bits of each repeat lie one behind the other, whatever the strides of the sources; the mask is not looked at.
template <typename T, typename U, bool isSetMask = true>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, CMPMODE mode,
             const uint64_t, uint8_t repeats, const BinaryRepeatParams& p) {
  static_assert(std::is_same_v<U, uint8_t>, "Compare gives bits in uint8");
  static_assert(twin::kOneOf<T, half, float, int32_t>, "comparisons take half, float and int32 on Ascend 910B");
  if (std::is_same_v<T, int32_t> && mode != CMPMODE::EQ) twin::Fail("compare-mode", "Compare of int32 has EQ only");
  const uint32_t lanes = twin::kRepeat / sizeof(T);
  const auto shape = twin::Shape::Repeats(lanes, repeats, sizeof(T));
  twin::Instruction instruction("Compare", PIPE_V, repeats);
  twin::Operand<uint8_t> d(dst, twin::Shape::First(repeats * lanes / 8), {}, "Compare");
  twin::Operand<T> x(a, shape, {p.src0BlkStride, p.src0RepStride}, "Compare");
  twin::Operand<T> y(b, shape, {p.src1BlkStride, p.src1RepStride}, "Compare");
  twin::Count("Compare", twin::NameOf<T>(), shape, repeats);
  x.Read(instruction);
  y.Read(instruction);
  d.Write(instruction);
  for (uint32_t r = 0; r < repeats; ++r) {
    for (uint32_t lane = 0; lane < lanes; lane += 8) {
      uint8_t bits = 0;
      for (uint32_t j = 0; j < 8; ++j) {
        bits |= twin::Holds<twin::Wide<T>>(mode, x.At(r, lane + j), y.At(r, lane + j)) << j;
      }
      d.Base()[(r * lanes + lane) / 8] = bits;
    }
  }
}

template <typename T, typename U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& a, const T scalar, CMPMODE mode, uint32_t count) {
  static_assert(std::is_same_v<U, uint8_t>, "CompareScalar gives bits in uint8");
  twin::CompareWith("CompareScalar", dst, a, static_cast<const LocalTensor<T>*>(nullptr), mode, count,
                    [&](uint32_t) { return twin::Wide<T>(scalar); });
}

template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a, const LocalTensor<T>& b,
            SELMODE mode, uint32_t count) {
  static_assert(std::is_same_v<U, uint8_t>, "Select takes bits in uint8");
  if (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) twin::Fail("select-mode", "two tensors in a mode for a scalar");
  twin::SelectWith(dst, mask, a, &b, mode == SELMODE::VSEL_CMPMASK_SPR, count,
                   [&](uint32_t i) { return reinterpret_cast<T*>(twin::Me().ub.At(b.Offset()))[i]; });
}

template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a, T scalar, SELMODE mode,
            uint32_t count) {
  static_assert(std::is_same_v<U, uint8_t>, "Select takes bits in uint8");
  if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) twin::Fail("select-mode", "a scalar in a mode for two tensors");
  twin::SelectWith(dst, mask, a, static_cast<const LocalTensor<T>*>(nullptr), false, count,
                   [&](uint32_t) { return scalar; });
}

// Bits of each repeat lie one behind the other, whatever the strides of the sources.
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a, const LocalTensor<T>& b,
            SELMODE mode, uint64_t lanes, uint8_t repeats, const BinaryRepeatParams& p) {
  static_assert(std::is_same_v<U, uint8_t> && twin::kReal<T>, "Select takes bits in uint8, and half or float");
  if (mode != SELMODE::VSEL_TENSOR_TENSOR_MODE) twin::Fail("select-mode", "the twin repeats VSEL_TENSOR_TENSOR_MODE only");
  const uint32_t full = twin::kRepeat / sizeof(T);
  const auto shape = twin::Shape::Repeats(lanes, repeats, sizeof(T));
  twin::Instruction instruction("Select", PIPE_V, repeats);
  twin::Operand<uint8_t> m(mask, twin::Shape::First(repeats * full / 8), {}, "Select");
  twin::Operand<T> d(dst, shape, {p.dstBlkStride, p.dstRepStride}, "Select");
  twin::Operand<T> x(a, shape, {p.src0BlkStride, p.src0RepStride}, "Select");
  twin::Operand<T> y(b, shape, {p.src1BlkStride, p.src1RepStride}, "Select");
  twin::CheckOverlap(d, x, true, "Select");
  twin::CheckOverlap(d, y, true, "Select");
  twin::Count("Select", twin::NameOf<T>(), shape, repeats);
  m.Read(instruction);
  x.Read(instruction);
  y.Read(instruction);
  d.Write(instruction);
  for (uint32_t r = 0; r < repeats; ++r) {
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      const uint32_t bit = r * full + lane;
      d.At(r, lane) = m.Base()[bit / 8] >> (bit % 8) & 1 ? x.At(r, lane) : y.At(r, lane);
    }
  }
}

// dst[i] = the element at byte base + offsets[i] of src.
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offsets,
            const uint32_t base, const uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather takes 16- and 32-bit types");
  const auto shape = twin::Shape::First(count);
  const double cycles = shape.Rounds(sizeof(T)) * twin::kRepeat / twin::rates::kGatherBytes;
  twin::Instruction instruction("Gather", PIPE_V, cycles);
  twin::Operand<T> d(dst, shape, {}, "Gather");
  twin::Operand<uint32_t> o(offsets, shape, {}, "Gather");
  twin::Operand<T> s(src, twin::Shape::First(src.GetSize()), {}, "Gather");
  twin::CheckOverlap(d, s, false, "Gather");
  twin::CheckOverlap(d, o, true, "Gather");
  twin::Count("Gather", twin::NameOf<T>(), shape, cycles);
  o.Read(instruction);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = uint64_t{base} + o.Base()[i];
    if (at % sizeof(T) || at + sizeof(T) > src.Bytes()) {
      twin::Fail("out-of-bounds", "Gather of byte %llu of a tensor of %u bytes", static_cast<unsigned long long>(at),
                 src.Bytes());
    }
    instruction.ReadLocal(src.Offset() + at, sizeof(T));
  }
  std::vector<T> found(count);
  for (uint32_t i = 0; i < count; ++i) found[i] = s.Base()[(base + o.Base()[i]) / sizeof(T)];
  d.Write(instruction);
  std::copy(found.begin(), found.end(), d.Base());
}

struct GatherMaskParams {
  GatherMaskParams() = default;
  GatherMaskParams(uint8_t src0BlockStride, uint16_t repeatTimes, uint16_t src0RepeatStride, uint8_t src1RepeatStride)
      : src0BlockStride(src0BlockStride), repeatTimes(repeatTimes), src0RepeatStride(src0RepeatStride),
        src1RepeatStride(src1RepeatStride) {}
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 0, src0RepeatStride = 0;
  uint8_t src1RepeatStride = 0;
};

// Elements whose bit is set, one behind the other. `mask` counts the elements of each repeat (counter mode).
template <typename T, typename U>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<U>& bits, const bool counted,
                const uint32_t mask, const GatherMaskParams& p, uint64_t& found) {
  static_assert(sizeof(T) == sizeof(U) && (sizeof(T) == 2 || sizeof(T) == 4), "bits come in words of the element's size");
  if (!counted) twin::Fail("gather-mask-mode", "the twin has GatherMask in counter mode only");
  if (p.repeatTimes != 1 || p.src0BlockStride != 1) {
    twin::Fail("gather-mask-mode", "the twin has GatherMask with one repeat of dense blocks");
  }
  const auto shape = twin::Shape::First(mask);
  const double cycles = shape.Rounds(sizeof(T)) * twin::kRepeat / twin::rates::kGatherMaskBytes;
  twin::Instruction instruction("GatherMask", PIPE_V, cycles);
  const uint32_t words = (mask + 8 * sizeof(U) - 1) / (8 * sizeof(U));
  twin::Operand<T> s(src, shape, {}, "GatherMask");
  twin::Operand<U> b(bits, twin::Shape::First(words), {}, "GatherMask");
  twin::Count("GatherMask", twin::NameOf<T>(), shape, cycles);
  s.Read(instruction);
  b.Read(instruction);
  std::vector<T> kept;
  for (uint32_t i = 0; i < mask; ++i) {
    if (reinterpret_cast<const uint8_t*>(b.Base())[i / 8] >> (i % 8) & 1) kept.push_back(s.Base()[i]);
  }
  twin::Operand<T> d(dst, twin::Shape::First(kept.size()), {}, "GatherMask");
  d.Write(instruction);
  std::copy(kept.begin(), kept.end(), d.Base());
  found = kept.size();
}

}  // namespace AscendC
