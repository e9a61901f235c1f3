// Tensors are addresses with bounds: LocalTensor in the unified buffer, GlobalTensor in global memory.
#pragma once

#include "core.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM };
using QuePosition = TPosition;
enum class CacheMode { CACHE_MODE_DISABLE = 0, CACHE_MODE_NORMAL = 1 };

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(TPosition position, uint32_t offset, uint32_t bytes)
      : offset_(offset), bytes_(bytes), position_(position) {}

  LocalTensor operator[](uint32_t elements) const {
    if (elements * sizeof(T) > bytes_) {
      twin::Fail("out-of-bounds", "element %u of a local tensor of %u", elements, GetSize());
    }
    return LocalTensor(position_, offset_ + elements * sizeof(T), bytes_ - elements * sizeof(T));
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(position_, offset_, bytes_);
  }

  T GetValue(uint32_t index) const {
    twin::Instruction get("GetValue", PIPE_S, 0);
    get.ReadLocal(Element(index), sizeof(T));
    T value;
    std::memcpy(static_cast<void*>(&value), twin::Me().ub.At(Element(index)), sizeof(T));
    return value;
  }
  template <typename U>
  void SetValue(uint32_t index, U value) const {
    twin::Instruction set("SetValue", PIPE_S, 0);
    set.WriteLocal(Element(index), sizeof(T));
    const T converted = static_cast<T>(value);
    std::memcpy(twin::Me().ub.At(Element(index)), static_cast<const void*>(&converted), sizeof(T));
  }
  T operator()(uint32_t index) const { return GetValue(index); }

  uint32_t GetSize() const { return bytes_ / sizeof(T); }
  void SetSize(uint32_t elements) {
    if (elements * sizeof(T) > bytes_) twin::Fail("out-of-bounds", "SetSize(%u) of a tensor of %u", elements, GetSize());
    bytes_ = elements * sizeof(T);
  }
  TPosition GetPosition() const { return position_; }

  // For the twin alone.
  uint32_t Offset() const { return offset_; }
  uint32_t Bytes() const { return bytes_; }

 private:
  uint32_t Element(uint32_t index) const {
    if ((index + 1) * sizeof(T) > bytes_) {
      twin::Fail("out-of-bounds", "element %u of a local tensor of %u", index, GetSize());
    }
    return offset_ + index * sizeof(T);
  }

  uint32_t offset_ = 0, bytes_ = 0;
  TPosition position_ = TPosition::VECCALC;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* address, uint64_t elements) {
    address_ = address;
    elements_ = elements;
  }
  void SetGlobalBuffer(T* address) { SetGlobalBuffer(address, kUnbounded); }
  void SetL2CacheHint(CacheMode) {}

  GlobalTensor operator[](uint64_t elements) const {
    GlobalTensor moved = *this;
    moved.address_ += elements;
    if (elements_ != kUnbounded) {
      if (elements > elements_) {
        twin::Fail("out-of-bounds", "element %zu of a global tensor of %zu", size_t(elements), size_t(elements_));
      }
      moved.elements_ -= elements;
    }
    return moved;
  }

  T GetValue(uint64_t index) const {
    twin::Instruction get("GetValue", PIPE_S, 0);
    T value;
    std::memcpy(static_cast<void*>(&value), get.ReadGlobal(At(index, 1), sizeof(T)), sizeof(T));
    return value;
  }
  void SetValue(uint64_t index, T value) const {
    twin::Instruction set("SetValue", PIPE_S, 0);
    set.WriteGlobal(At(index, 1), sizeof(T), false);
    std::memcpy(static_cast<void*>(At(index, 1)), &value, sizeof(T));
  }
  T* GetPhyAddr() const { return address_; }
  T* GetPhyAddr(uint64_t index) const { return address_ + index; }
  uint64_t GetSize() const { return elements_ == kUnbounded ? 0 : elements_; }

  // For the twin alone: the address of some elements from an index on, which the tensor holds.
  T* At(uint64_t index, uint64_t count) const {
    if (elements_ != kUnbounded && index + count > elements_) {
      twin::Fail("out-of-bounds", "elements %zu to %zu of a global tensor of %zu", size_t(index), size_t(index + count),
                 size_t(elements_));
    }
    return address_ + index;
  }

 private:
  static constexpr uint64_t kUnbounded = ~uint64_t{0};
  T* address_ = nullptr;
  uint64_t elements_ = kUnbounded;
};

}  // namespace AscendC
