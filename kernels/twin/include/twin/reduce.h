// Reductions, in the order of the hardware: pairs within a repeat, then one repeat behind the other.
#pragma once

#include "select.h"

namespace AscendC {

enum class ReduceOrder { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

namespace twin {

template <typename T, typename F>
T Tree(std::vector<T> values, F f) {
  for (size_t size = values.size(); size > 1; size = (size + 1) / 2) {
    for (size_t i = 0; i < size / 2; ++i) values[i] = f(Wide<T>(values[2 * i]), Wide<T>(values[2 * i + 1]));
    if (size % 2) values[size / 2] = values[size - 1];
  }
  return values[0];
}

struct Plus { template <typename T> T operator()(T a, T b) const { return a + b; } };
struct Larger { template <typename T> T operator()(T a, T b) const { return a > b ? a : b; } };
struct Smaller { template <typename T> T operator()(T a, T b) const { return a < b ? a : b; } };

// One result for each group of lanes of each repeat, `pitch` elements apart.
template <typename T, typename F>
void ReduceGroups(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t mask,
                  uint32_t repeats, uint32_t group, uint32_t repeatPitch, Stride from, F f) {
  static_assert(kReal<T>, "reductions take half and float");
  const auto shape = Shape::Repeats(mask, repeats, sizeof(T));
  const double cycles = shape.Rounds(sizeof(T));
  Instruction instruction(name, PIPE_V, cycles);
  Operand<T> s(src, shape, from, name);
  Count(name, NameOf<T>(), shape, cycles);
  s.Read(instruction);
  const uint32_t perRepeat = (mask + group - 1) / group;
  if (repeats == 0) return;
  Operand<T> d(dst, Shape::First((repeats - 1) * repeatPitch + perRepeat), {}, name);
  std::vector<T> results;
  for (uint32_t r = 0; r < repeats; ++r) {
    for (uint32_t g = 0; g < perRepeat; ++g) {
      std::vector<T> values;
      for (uint32_t lane = g * group; lane < std::min(mask, (g + 1) * group); ++lane) values.push_back(s.At(r, lane));
      results.push_back(Tree(values, f));
    }
  }
  for (uint32_t r = 0; r < repeats; ++r) {
    instruction.WriteLocal(dst.Offset() + r * repeatPitch * sizeof(T), perRepeat * sizeof(T));
    for (uint32_t g = 0; g < perRepeat; ++g) d.Base()[r * repeatPitch + g] = results[r * perRepeat + g];
  }
}

// One result for all elements: repeats are reduced each on its own, then one behind the other.
template <typename T, typename F>
T ReduceFirst(const char* name, const LocalTensor<T>& src, uint32_t count, Instruction& instruction, F f) {
  if (count == 0) Fail("count", "%s of no elements", name);
  Operand<T> s(src, Shape::First(count), {}, name);
  s.Read(instruction);
  const uint32_t full = kRepeat / sizeof(T);
  T total{};
  for (uint32_t first = 0; first < count; first += full) {
    std::vector<T> values(s.Base() + first, s.Base() + std::min(count, first + full));
    const T part = Tree(values, f);
    total = first == 0 ? part : T(f(Wide<T>(total), Wide<T>(part)));
  }
  return total;
}

template <typename T, typename F>
void ReduceExtreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count,
                   bool withIndex, F f) {
  static_assert(kReal<T>, "reductions take half and float");
  if (withIndex) Fail("reduce-index", "the twin has %s without an index", name);
  const auto shape = Shape::First(count);
  const double cycles = shape.Rounds(sizeof(T));
  Instruction instruction(name, PIPE_V, cycles);
  Count(name, NameOf<T>(), shape, cycles);
  const T result = ReduceFirst(name, src, count, instruction, f);
  Operand<T> d(dst, Shape::First(1), {}, name);
  d.Write(instruction);
  *d.Base() = result;
}

}  // namespace twin

template <typename T, bool isSetMask = true>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, const int32_t count) {
  twin::ReduceExtreme("ReduceSum", dst, src, count, false, twin::Plus{});
}
template <typename T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, const int32_t count,
               bool withIndex = false) {
  twin::ReduceExtreme("ReduceMax", dst, src, count, withIndex, twin::Larger{});
}
template <typename T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>&, const int32_t count,
               bool withIndex = false) {
  twin::ReduceExtreme("ReduceMin", dst, src, count, withIndex, twin::Smaller{});
}

// One value for each repeat; dstRepStride counts elements.
template <typename T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeats,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride) {
  twin::ReduceGroups("WholeReduceSum", dst, src, mask, repeats, mask, dstRepStride,
                     {static_cast<uint32_t>(srcBlkStride), static_cast<uint32_t>(srcRepStride)}, twin::Plus{});
}

namespace twin {

template <typename T, typename F>
void WholeExtreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeats,
                  int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride, ReduceOrder order, F f) {
  if (order != ReduceOrder::ORDER_ONLY_VALUE) Fail("reduce-index", "the twin has %s with ORDER_ONLY_VALUE", name);
  ReduceGroups(name, dst, src, mask, repeats, mask, dstRepStride,
               {static_cast<uint32_t>(srcBlkStride), static_cast<uint32_t>(srcRepStride)}, f);
}

}  // namespace twin

template <typename T, bool isSetMask = true>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeats,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  twin::WholeExtreme("WholeReduceMax", dst, src, mask, repeats, dstRepStride, srcBlkStride, srcRepStride, order,
                     twin::Larger{});
}
template <typename T, bool isSetMask = true>
void WholeReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeats,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  twin::WholeExtreme("WholeReduceMin", dst, src, mask, repeats, dstRepStride, srcBlkStride, srcRepStride, order,
                     twin::Smaller{});
}

// One value for each block of 32 bytes; dstRepStride counts groups of eight results.
#define TWIN_BLOCK_REDUCE(NAME, FUNCTION)                                                                            \
  template <typename T, bool isSetMask = true>                                                                       \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeats, const int32_t mask,          \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride) {                    \
    twin::ReduceGroups(#NAME, dst, src, mask, repeats, twin::kBlock / sizeof(T), dstRepStride * 8,                    \
                       {static_cast<uint32_t>(srcBlkStride), static_cast<uint32_t>(srcRepStride)}, twin::FUNCTION{}); \
  }
TWIN_BLOCK_REDUCE(BlockReduceSum, Plus)
TWIN_BLOCK_REDUCE(BlockReduceMax, Larger)
TWIN_BLOCK_REDUCE(BlockReduceMin, Smaller)
#undef TWIN_BLOCK_REDUCE

}  // namespace AscendC
