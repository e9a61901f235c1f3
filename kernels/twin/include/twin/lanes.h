// Which elements an instruction touches: the first `count`, or lanes of repeats that are some blocks apart.
#pragma once

#include "queue.h"

namespace AscendC {

struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dstBlkStride, uint16_t srcBlkStride, uint8_t dstRepStride, uint8_t srcRepStride)
      : dstBlkStride(dstBlkStride), srcBlkStride(srcBlkStride), dstRepStride(dstRepStride), srcRepStride(srcRepStride) {}
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dstBlkStride, uint8_t src0BlkStride, uint8_t src1BlkStride, uint8_t dstRepStride,
                     uint8_t src0RepStride, uint8_t src1RepStride)
      : dstBlkStride(dstBlkStride), src0BlkStride(src0BlkStride), src1BlkStride(src1BlkStride),
        dstRepStride(dstRepStride), src0RepStride(src0RepStride), src1RepStride(src1RepStride) {}
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

namespace twin {

constexpr uint32_t kRepeat = 256;  // bytes

// How often, and how many lanes each time.
struct Shape {
  uint32_t lanes = 0, repeats = 1;
  bool dense = true;  // one run of `lanes` elements

  static Shape First(int64_t count) {
    if (count < 0) Fail("count", "a count of %lld elements", static_cast<long long>(count));
    Shape shape;
    shape.lanes = static_cast<uint32_t>(count);
    return shape;
  }
  // `width` is the size of the widest element: a repeat has 256 bytes of those.
  static Shape Repeats(uint64_t mask, int64_t repeats, size_t width) {
    if (mask < 1 || mask > kRepeat / width) {
      Fail("mask", "a mask of %llu lanes; 1 to %zu fit a repeat", static_cast<unsigned long long>(mask), kRepeat / width);
    }
    if (repeats < 0 || repeats > 255) Fail("repeat", "%lld repeats; at most 255", static_cast<long long>(repeats));
    Shape shape;
    shape.lanes = static_cast<uint32_t>(mask);
    shape.repeats = static_cast<uint32_t>(repeats);
    shape.dense = false;
    return shape;
  }
  uint32_t Elements() const { return lanes * repeats; }
  // Repeats that the vector unit runs; a partial one costs as much as a full one.
  double Rounds(size_t width) const {
    const uint32_t full = kRepeat / width;
    return dense ? (lanes + full - 1) / full : repeats;
  }
};

// Strides of one operand, in blocks of 32 bytes.
struct Stride {
  uint32_t block = 1, repeat = 8;
};

// An operand of a vector instruction, checked and entered into the record of memory.
template <typename T>
class Operand {
 public:
  Operand(const LocalTensor<T>& tensor, const Shape& shape, Stride stride, const char* name)
      : tensor_(tensor), shape_(shape), stride_(stride) {
    if (tensor.Offset() % kBlock) {
      Fail("alignment", "%s: an operand at UB byte %u, which is no multiple of 32", name, tensor.Offset());
    }
    if (shape.dense) {
      CheckEnd(shape.lanes, name);
    } else if (shape.repeats) {
      CheckEnd(Place(shape.repeats - 1, shape.lanes - 1) + 1, name);
    }
    base_ = reinterpret_cast<T*>(Me().ub.At(tensor.Offset()));
  }

  void Read(Instruction& by) const {
    ForRuns([&](uint32_t first, uint32_t count) { by.ReadLocal(Byte(first), count * sizeof(T)); });
  }
  void Write(Instruction& by) const {
    ForRuns([&](uint32_t first, uint32_t count) { by.WriteLocal(Byte(first), count * sizeof(T)); });
  }

  T& At(uint32_t repeat, uint32_t lane) const { return base_[shape_.dense ? lane : Place(repeat, lane)]; }
  T* Base() const { return base_; }
  uint32_t Begin() const { return tensor_.Offset(); }
  uint32_t End() const {
    if (shape_.dense) return Byte(shape_.lanes);
    return shape_.repeats ? Byte(Place(shape_.repeats - 1, shape_.lanes - 1) + 1) : Begin();
  }

  // Calls f(byte, bytes) for each block that is touched.
  template <typename F>
  void ForBytes(F f) const {
    if (!shape_.dense) return ForRuns([&](uint32_t first, uint32_t count) { f(Byte(first), count * sizeof(T)); });
    for (uint32_t at = Begin(); at < End(); at += kBlock) f(at, std::min(kBlock, End() - at));
  }

 private:
  // Lanes of a repeat lie in eight blocks; a block has as many lanes as the widest operand has elements in 32 bytes.
  uint32_t Place(uint32_t repeat, uint32_t lane) const {
    const uint32_t own = kBlock / sizeof(T);
    return repeat * stride_.repeat * own + lane / own * stride_.block * own + lane % own;
  }
  uint32_t Byte(uint32_t element) const { return tensor_.Offset() + element * sizeof(T); }
  void CheckEnd(uint32_t elements, const char* name) const {
    if (elements * sizeof(T) > tensor_.Bytes()) {
      Fail("out-of-bounds", "%s: %u elements of an operand that has %u", name, elements, tensor_.GetSize());
    }
  }
  template <typename F>
  void ForRuns(F f) const {
    if (shape_.dense) return f(0, shape_.lanes);
    const uint32_t own = kBlock / sizeof(T);
    for (uint32_t repeat = 0; repeat < shape_.repeats; ++repeat) {
      for (uint32_t lane = 0; lane < shape_.lanes; lane += own) {
        f(Place(repeat, lane), std::min(own, shape_.lanes - lane));
      }
    }
  }

  LocalTensor<T> tensor_;
  Shape shape_;
  Stride stride_;
  T* base_;
};

// Lanes of repeats that bits choose: one bit for each lane of a repeat, the same in all.
template <typename T>
class Chosen {
 public:
  Chosen(const LocalTensor<T>& tensor, const uint64_t* mask, uint32_t repeats, Stride stride, const char* name)
      : offset_(tensor.Offset()), mask_(mask), repeats_(repeats), stride_(stride) {
    if (offset_ % kBlock) Fail("alignment", "%s: an operand at UB byte %u, which is no multiple of 32", name, offset_);
    ForLanes([&](uint32_t repeat, uint32_t lane) {
      if ((Place(repeat, lane) + 1) * sizeof(T) > tensor.Bytes()) {
        Fail("out-of-bounds", "%s: lane %u of repeat %u of an operand that has %u elements", name, lane, repeat,
             tensor.GetSize());
      }
    });
  }

  void Read(Instruction& by) const {
    ForBlocks([&](uint32_t at) { by.ReadLocal(at, kBlock); });
  }
  void Write(Instruction& by) const {
    ForBlocks([&](uint32_t at) { by.WriteLocal(at, kBlock); });
  }
  T& At(uint32_t repeat, uint32_t lane) const { return reinterpret_cast<T*>(Me().ub.At(offset_))[Place(repeat, lane)]; }

  template <typename F>
  void ForLanes(F f) const {
    for (uint32_t repeat = 0; repeat < repeats_; ++repeat) {
      for (uint32_t lane = 0; lane < kRepeat / sizeof(T); ++lane) {
        if (!(mask_[lane / 64] >> (lane % 64) & 1)) continue;
        if constexpr (std::is_invocable_v<F, uint32_t, uint32_t, T&>) {
          f(repeat, lane, At(repeat, lane));
        } else {
          f(repeat, lane);
        }
      }
    }
  }

 private:
  static constexpr uint32_t kLanes = kBlock / sizeof(T);  // of a block

  uint32_t Place(uint32_t repeat, uint32_t lane) const {
    return (repeat * stride_.repeat + lane / kLanes * stride_.block) * kLanes + lane % kLanes;
  }
  // Memory is recorded by the block.
  template <typename F>
  void ForBlocks(F f) const {
    uint32_t last = ~0u;
    ForLanes([&](uint32_t repeat, uint32_t lane) {
      const uint32_t block = (offset_ + Place(repeat, lane) * sizeof(T)) / kBlock;
      if (block != last) f(block * kBlock);
      last = block;
    });
  }

  uint32_t offset_;
  const uint64_t* mask_;
  uint32_t repeats_;
  Stride stride_;
};

// Legal: the same elements, or none in common.
template <typename A, typename B>
void CheckOverlap(const Operand<A>& dst, const Operand<B>& src, bool sameAllowed, const char* name) {
  const bool apart = dst.End() <= src.Begin() || src.End() <= dst.Begin();
  if (apart || (sameAllowed && dst.Begin() == src.Begin())) return;
  // Rows of one may lie in the gaps between those of the other.
  std::vector<bool> written((dst.End() - dst.Begin()) / kBlock + 1);
  dst.ForBytes([&](uint32_t first, uint32_t) { written[(first - dst.Begin()) / kBlock] = true; });
  src.ForBytes([&](uint32_t first, uint32_t) {
    if (first < dst.Begin() || first >= dst.End() || !written[(first - dst.Begin()) / kBlock]) return;
    Fail("overlap", "%s: destination and source overlap in part", name);
  });
}

inline void Count(const char* name, const char* type, const Shape& shape, double cycles) {
  auto& counters = Me().counters;
  const std::string key = std::string(name) + " " + type;
  counters.elements[key] += shape.Elements();
  counters.cycles[key] += cycles;
}

}  // namespace twin
}  // namespace AscendC
