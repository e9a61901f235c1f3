// Panels of rows in the unified buffer: copies, broadcasts along rows and columns, sums of rows and of columns.
#pragma once

#include "kernel_operator.h"

namespace turbogr::row_norm {

template <typename T>
using Local = AscendC::LocalTensor<T>;
using Floats = AscendC::LocalTensor<float>;

constexpr int32_t kLanes = 64;  // floats of one repeat
constexpr int32_t kBlock = 8;   // floats of 32 bytes

// Some rows of some columns. Rows begin `pitch` numbers apart, which is `columns` up to the next 32 bytes.
struct Panel {
  int32_t rows;
  int32_t columns;
  int32_t pitch;

  __aicore__ inline int32_t Count() const { return rows * pitch; }
};

// The part of work that falls to one core: all have as much, or one less.
struct Share {
  int64_t begin;
  int64_t end;
};
__aicore__ inline Share ShareOf(int64_t total) {
  const int64_t core = AscendC::GetBlockIdx();
  const int64_t cores = AscendC::GetBlockNum();
  const int64_t each = total / cores;
  const int64_t more = total % cores;
  const int64_t begin = core * each + (core < more ? core : more);
  return {begin, begin + each + (core < more ? 1 : 0)};
}

__aicore__ inline int32_t RoundUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }
__aicore__ inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
__aicore__ inline Panel PanelOf(int32_t rows, int32_t columns) {
  return {rows, columns, RoundUp(columns, static_cast<int32_t>(32 / sizeof(T)))};
}

__aicore__ inline void Step() { AscendC::PipeBarrier<PIPE_V>(); }  // what follows sees what came before

// --- to and from global memory ---------------------------------------------------------------------------------------

// A panel of rows of `width` numbers each. What fills a row up to 32 bytes is zero.
template <typename T>
__aicore__ inline void Load(const Local<T>& to, const AscendC::GlobalTensor<T>& from, const Panel& panel,
                            int32_t width) {
  if (panel.pitch == width) {
    AscendC::DataCopy(to, from, panel.Count());
    return;
  }
  AscendC::DataCopyExtParams sizes;
  sizes.blockCount = panel.rows;
  sizes.blockLen = panel.columns * sizeof(T);
  sizes.srcStride = (width - panel.columns) * sizeof(T);
  sizes.dstStride = 0;
  AscendC::DataCopyPadExtParams<T> padding;
  padding.isPad = true;
  padding.rightPadding = panel.pitch - panel.columns;
  AscendC::DataCopyPad(to, from, sizes, padding);
}

template <typename T>
__aicore__ inline void Store(const AscendC::GlobalTensor<T>& to, const Local<T>& from, const Panel& panel,
                             int32_t width) {
  if (panel.pitch == width) {
    AscendC::DataCopy(to, from, panel.Count());
    return;
  }
  AscendC::DataCopyExtParams sizes;
  sizes.blockCount = panel.rows;
  sizes.blockLen = panel.columns * sizeof(T);
  sizes.srcStride = 0;
  sizes.dstStride = (width - panel.columns) * sizeof(T);
  AscendC::DataCopyPad(to, from, sizes);
}

// --- between a dtype and float ---------------------------------------------------------------------------------------

template <typename T>
constexpr bool kWide = AscendC::IsSameType<T, float>::value;

template <typename T>
__aicore__ inline void ToFloat(const Floats& to, const Local<T>& from, int32_t count) {
  if constexpr (kWide<T>) {
    AscendC::DataCopy(to, from, count);
  } else {
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, count);
  }
}

template <typename T>
__aicore__ inline void FromFloat(const Local<T>& to, const Floats& from, int32_t count) {
  if constexpr (kWide<T>) {
    AscendC::DataCopy(to, from, count);
  } else {
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, count);
  }
}

// The tensor itself where it holds floats; else `room`, for what is cast from it or to it.
template <typename T>
__aicore__ inline Floats Floating(const Local<T>& tensor, const Floats& room) {
  if constexpr (kWide<T>) {
    return tensor;
  } else {
    return room;
  }
}

// The numbers of a tensor as floats: in place, or cast into `room`.
template <typename T>
__aicore__ inline Floats Widen(const Local<T>& from, const Floats& room, int32_t count) {
  if constexpr (!kWide<T>) AscendC::Cast(room, from, AscendC::RoundMode::CAST_NONE, count);
  return Floating(from, room);
}

// `from` was given by Floating(to, ...): floats are in their place already.
template <typename T>
__aicore__ inline void Narrow(const Local<T>& to, const Floats& from, int32_t count) {
  if constexpr (!kWide<T>) {
    Step();
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, count);
  }
}

// --- broadcasts ------------------------------------------------------------------------------------------------------

enum class Binary { kAdd, kSub, kMul };

template <Binary op>
__aicore__ inline void Apply(const Floats& to, const Floats& a, const Floats& b, uint64_t lanes, uint8_t repeats,
                             const AscendC::BinaryRepeatParams& strides) {
  if constexpr (op == Binary::kAdd) AscendC::Add(to, a, b, lanes, repeats, strides);
  if constexpr (op == Binary::kSub) AscendC::Sub(to, a, b, lanes, repeats, strides);
  if constexpr (op == Binary::kMul) AscendC::Mul(to, a, b, lanes, repeats, strides);
}

// to[r, c] = a[r, c] op b[r, c]; rows of `to` and `a` lie `pitch` apart, those of b `pitchB`. With `spread`, b holds
// the same number eight times for each row. Instructions go down the rows or along them, whichever are fewer.
template <Binary op, bool spread = false>
__aicore__ inline void Sweep(const Floats& to, const Floats& a, const Floats& b, int32_t rows, int32_t columns,
                             int32_t pitch, int32_t pitchB) {
  const int32_t whole = columns / kLanes;
  const int32_t rest = columns % kLanes;
  constexpr uint8_t blockB = spread ? 0 : 1;
  if (rows < whole) {
    const AscendC::BinaryRepeatParams along = {1, 1, blockB, 8, 8, static_cast<uint8_t>(spread ? 0 : 8)};
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t at = r * pitch;
      Apply<op>(to[at], a[at], b[r * pitchB], kLanes, whole, along);
      if (rest > 0) {
        const int32_t tail = whole * kLanes;
        Apply<op>(to[at + tail], a[at + tail], b[r * pitchB + (spread ? 0 : tail)], rest, 1, along);
      }
    }
    return;
  }
  const uint8_t stride = pitch / kBlock;
  const AscendC::BinaryRepeatParams down = {1, 1, blockB, stride, stride, static_cast<uint8_t>(pitchB / kBlock)};
  for (int32_t c = 0; c < columns; c += kLanes) {
    Apply<op>(to[c], a[c], b[spread ? 0 : c], Least(kLanes, columns - c), rows, down);
  }
}

// to[r, c] = a[r, c] op vector[c]
template <Binary op>
__aicore__ inline void WithColumns(const Floats& to, const Floats& a, const Floats& vector, const Panel& panel) {
  Sweep<op>(to, a, vector, panel.rows, panel.pitch, panel.pitch, 0);
}

// to[r, c] = a[r, c] op scalar[r]; `scalars` are spread, as Spread leaves them.
template <Binary op>
__aicore__ inline void WithRows(const Floats& to, const Floats& a, const Floats& scalars, const Panel& panel) {
  Sweep<op, true>(to, a, scalars, panel.rows, panel.pitch, panel.pitch, kBlock);
}

// Each scalar fills a block. There are scalars for whole groups of eight rows, needed or not.
__aicore__ inline void Spread(const Floats& to, const Floats& scalars, int32_t rows) {
  AscendC::Brcb(to, scalars, static_cast<uint8_t>(RoundUp(rows, kBlock) / kBlock), {1, 8});
}

// --- sums ------------------------------------------------------------------------------------------------------------

// sums[r] = sum of `lanes` numbers of each row, or that is added to it.
__aicore__ inline void Collect(const Floats& sums, const Floats& spare, const Floats& from, int32_t lanes,
                              const Panel& panel, bool add) {
  AscendC::WholeReduceSum<float>(add ? spare : sums, from, lanes, panel.rows, 1, 1, panel.pitch / kBlock);
  Step();
  if (add) {
    AscendC::Add(sums, sums, spare, panel.rows);
    Step();
  }
}

// sums[r] = sum of row r, or that is added to it. Halves of a row are added until 64 lanes are left, in an order that
// depends on the number of columns alone. `scratch` is a panel like `from`; it may be `from`, which is lost then.
__aicore__ inline void RowSums(const Floats& sums, const Floats& spare, const Floats& from, const Floats& scratch,
                               const Panel& panel, bool add) {
  const int32_t whole = panel.columns / kLanes;
  const int32_t rest = panel.columns % kLanes;
  const int32_t pitch = panel.pitch;
  if (whole > 1) {
    int32_t pairs = whole / 2;
    Sweep<Binary::kAdd>(scratch, from, from[(whole - pairs) * kLanes], panel.rows, pairs * kLanes, pitch, pitch);
    Step();
    if (whole % 2 == 1) {
      Sweep<Binary::kAdd>(scratch, scratch, from[pairs * kLanes], panel.rows, kLanes, pitch, pitch);
      Step();
    }
    for (int32_t left = pairs; left > 1; left -= pairs) {
      pairs = left / 2;
      Sweep<Binary::kAdd>(scratch, scratch, scratch[(left - pairs) * kLanes], panel.rows, pairs * kLanes, pitch, pitch);
      Step();
    }
  }
  if (whole > 0) Collect(sums, spare, whole > 1 ? scratch : from, kLanes, panel, add);
  if (rest > 0) Collect(sums, spare, from[whole * kLanes], rest, panel, add || whole > 0);
}

// total[c] += sum of column c, in an order that depends on the number of rows alone. `scratch` as above.
__aicore__ inline void AddColumnSums(const Floats& total, const Floats& from, const Floats& scratch,
                                     const Panel& panel) {
  const int32_t pitch = panel.pitch;
  if (panel.rows > 1) {
    int32_t pairs = panel.rows / 2;
    AscendC::Add(scratch, from, from[(panel.rows - pairs) * pitch], pairs * pitch);
    Step();
    if (panel.rows % 2 == 1) {
      AscendC::Add(scratch, scratch, from[pairs * pitch], pitch);
      Step();
    }
    for (int32_t left = pairs; left > 1; left -= pairs) {
      pairs = left / 2;
      AscendC::Add(scratch, scratch, scratch[(left - pairs) * pitch], pairs * pitch);
      Step();
    }
  }
  AscendC::Add(total, total, panel.rows > 1 ? scratch : from, pitch);
  Step();
}

}  // namespace turbogr::row_norm
