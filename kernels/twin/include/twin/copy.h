// Copies between global memory and the unified buffer, with additions into global memory.
#pragma once

#include "reduce.h"

namespace AscendC {

struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(uint16_t count, uint16_t len, uint16_t srcStride, uint16_t dstStride)
      : blockCount(count), blockLen(len), srcStride(srcStride), dstStride(dstStride) {}
  uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;  // in blocks of 32 bytes
};

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(uint16_t count, uint32_t len, uint32_t srcStride, uint32_t dstStride, uint32_t reserved)
      : blockCount(count), blockLen(len), srcStride(srcStride), dstStride(dstStride), rsv(reserved) {}
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;  // bytes; strides of UB in blocks of 32 bytes
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool isPad, uint8_t left, uint8_t right, T value)
      : isPad(isPad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};
};

namespace twin {

template <typename T>
T BitsFromPoison() {
  T value;
  const uint64_t bits = uint64_t{kPoison} << 32 | kPoison;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// Rows of bytes, some apart in either memory.
struct Rows {
  uint32_t count, bytes;
  size_t globalPitch;
  uint32_t localPitch;
};

template <typename T>
void CheckCopy(const LocalTensor<T>& local, const Rows& rows, uint32_t localBytes, const char* name) {
  if (rows.count > 4095) Fail("copy-blocks", "%s of %u blocks; at most 4095", name, rows.count);
  if (rows.bytes > 2097151) Fail("copy-blocks", "%s of blocks of %u bytes; at most 2097151", name, rows.bytes);
  if (local.Offset() % kBlock) {
    Fail("alignment", "%s: UB byte %u is no multiple of 32", name, local.Offset());
  }
  if (rows.count && rows.bytes && (rows.count - 1) * size_t{rows.localPitch} + localBytes > local.Bytes()) {
    Fail("out-of-bounds", "%s of %u blocks of %u bytes in UB, into a tensor of %u", name, rows.count, localBytes,
         local.Bytes());
  }
}

template <typename T>
void CopyIn(const char* name, const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Rows& rows, uint32_t left,
            uint32_t right, bool isPad, T padding) {
  const uint32_t before = left * sizeof(T), after = right * sizeof(T);
  const uint32_t filled = (before + rows.bytes + after + kBlock - 1) / kBlock * kBlock;
  CheckCopy(dst, rows, filled, name);
  if (rows.count == 0 || rows.bytes == 0) return;
  const auto* from = reinterpret_cast<const uint8_t*>(src.GetPhyAddr());
  src.At(0, ((rows.count - 1) * rows.globalPitch + rows.bytes) / sizeof(T));
  const double all = double(rows.count) * rows.bytes;
  double fresh = 0;
  for (uint32_t row = 0; row < rows.count; ++row) fresh += FreshBytes(from + row * rows.globalPitch, rows.bytes, name);
  auto& bytes = Me().counters.bytes;
  bytes["memory to UB"] += fresh;
  bytes["L2 to UB"] += all - fresh;
  Instruction instruction(name, PIPE_MTE2, all / rates::kL2Bytes);
  for (uint32_t row = 0; row < rows.count; ++row) {
    const uint8_t* source = instruction.ReadGlobal(from + row * rows.globalPitch, rows.bytes);
    const uint32_t at = dst.Offset() + row * rows.localPitch;
    instruction.WriteLocal(at, filled);
    uint8_t* to = Me().ub.At(at);
    if (filled != rows.bytes) {
      // Dummies: the first element where nothing is said, the padding where it is, else whatever was there.
      T dummy{};
      std::memcpy(static_cast<void*>(&dummy), source, sizeof(T));
      if (left || right) dummy = isPad ? padding : BitsFromPoison<T>();
      for (uint32_t i = 0; i < filled; i += sizeof(T)) std::memcpy(to + i, static_cast<const void*>(&dummy), sizeof(T));
    }
    std::memcpy(to + before, source, rows.bytes);
  }
}

template <typename T>
void AddInto(T* to, const T* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, bfloat16_t>) {
      to[i] = T(static_cast<float>(to[i]) + static_cast<float>(from[i]));
    } else {
      to[i] = static_cast<T>(Wide<T>(to[i]) + Wide<T>(from[i]));
    }
  }
}

template <typename T>
constexpr Atomic AtomicOf() {
  if (std::is_same_v<T, float>) return Atomic::kFloat;
  if (std::is_same_v<T, half>) return Atomic::kHalf;
  if (std::is_same_v<T, bfloat16_t>) return Atomic::kBFloat;
  if (std::is_same_v<T, int32_t>) return Atomic::kInt32;
  if (std::is_same_v<T, int16_t>) return Atomic::kInt16;
  return Atomic::kNone;
}

template <typename T>
void CopyOut(const char* name, const GlobalTensor<T>& dst, const LocalTensor<T>& src, const Rows& rows) {
  CheckCopy(src, rows, rows.bytes, name);
  if (rows.count == 0 || rows.bytes == 0) return;
  const bool atomic = Me().atomic != Atomic::kNone;
  if (atomic && Me().atomic != AtomicOf<T>()) {
    Fail("atomic-type", "%s of %s while additions are of another type", name, NameOf<T>());
  }
  auto* to = reinterpret_cast<uint8_t*>(dst.GetPhyAddr());
  dst.At(0, ((rows.count - 1) * rows.globalPitch + rows.bytes) / sizeof(T));
  const double all = double(rows.count) * rows.bytes;
  double fresh = 0;
  for (uint32_t row = 0; row < rows.count; ++row) fresh += FreshBytes(to + row * rows.globalPitch, rows.bytes, name);
  Me().counters.bytes["UB to L2"] += all;
  Me().counters.bytes["first written"] += fresh;
  Instruction instruction(name, PIPE_MTE3, all / rates::kStoreBytes);
  for (uint32_t row = 0; row < rows.count; ++row) {
    const uint32_t at = src.Offset() + row * rows.localPitch;
    uint8_t* target = to + row * rows.globalPitch;
    instruction.ReadLocal(at, rows.bytes);
    instruction.WriteGlobal(target, rows.bytes, atomic);
    if (atomic) {
      AddInto(reinterpret_cast<T*>(target), reinterpret_cast<const T*>(Me().ub.At(at)), rows.bytes / sizeof(T));
    } else {
      std::memcpy(target, Me().ub.At(at), rows.bytes);
    }
  }
}

// Copies of whole blocks: a count that is no multiple of 32 bytes would be rounded down.
inline uint32_t WholeBlocks(const char* name, uint64_t bytes) {
  if (bytes % kBlock) {
    Fail("copy-tail", "%s of %llu bytes: no multiple of 32, so the tail would be lost", name,
         static_cast<unsigned long long>(bytes));
  }
  return static_cast<uint32_t>(bytes);
}

inline Rows RowsOf(const DataCopyParams& p, bool intoLocal) {
  const uint32_t bytes = p.blockLen * kBlock;
  const uint32_t from = bytes + p.srcStride * kBlock, to = bytes + p.dstStride * kBlock;
  return {p.blockCount, bytes, intoLocal ? from : to, intoLocal ? to : from};
}

}  // namespace twin

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
  const uint32_t bytes = twin::WholeBlocks("DataCopy", uint64_t{count} * sizeof(T));
  twin::CopyIn("DataCopy", dst, src, {1, bytes, bytes, bytes}, 0, 0, false, T{});
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  const uint32_t bytes = twin::WholeBlocks("DataCopy", uint64_t{count} * sizeof(T));
  twin::CopyOut("DataCopy", dst, src, {1, bytes, bytes, bytes});
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params) {
  twin::CopyIn("DataCopy", dst, src, twin::RowsOf(params, true), 0, 0, false, T{});
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params) {
  twin::CopyOut("DataCopy", dst, src, twin::RowsOf(params, false));
}
// Within the unified buffer a copy is the vector unit's.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  twin::WholeBlocks("DataCopy", uint64_t{count} * sizeof(T));
  twin::Unary("DataCopy", dst, src, twin::Shape::First(count), {}, {}, 1.0, [](T x) { return x; });
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad) {
  if (p.blockLen % sizeof(T)) twin::Fail("copy-tail", "DataCopyPad of %u bytes: no whole elements", p.blockLen);
  if (pad.leftPadding * sizeof(T) > twin::kBlock || pad.rightPadding * sizeof(T) > twin::kBlock) {
    twin::Fail("copy-padding", "DataCopyPad pads at most 32 bytes on either side");
  }
  const uint32_t padded = p.blockLen + (pad.leftPadding + pad.rightPadding) * sizeof(T);
  const uint32_t filled = (padded + twin::kBlock - 1) / twin::kBlock * twin::kBlock;
  twin::CopyIn("DataCopyPad", dst, src,
               {p.blockCount, p.blockLen, size_t{p.blockLen} + p.srcStride, filled + p.dstStride * twin::kBlock},
               pad.leftPadding, pad.rightPadding, pad.isPad, pad.paddingValue);
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p) {
  if (p.blockLen % sizeof(T)) twin::Fail("copy-tail", "DataCopyPad of %u bytes: no whole elements", p.blockLen);
  const uint32_t filled = (p.blockLen + twin::kBlock - 1) / twin::kBlock * twin::kBlock;
  twin::CopyOut("DataCopyPad", dst, src,
                {p.blockCount, p.blockLen, size_t{p.blockLen} + p.dstStride, filled + p.srcStride * twin::kBlock});
}

template <typename T>
void SetAtomicAdd() {
  static_assert(twin::AtomicOf<T>() != twin::Atomic::kNone, "no atomic addition of this type");
  twin::Me().atomic = twin::AtomicOf<T>();
}
inline void SetAtomicNone() { twin::Me().atomic = twin::Atomic::kNone; }

}  // namespace AscendC
