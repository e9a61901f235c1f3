// Vector code that attention's forward and backward have in common: slabs in and out, sums and factors of rows.
#pragma once

#include "attention_tile.h"

namespace turbogr {

using Input = TQue<TPosition::VECIN, 1>;
using Output = TQue<TPosition::VECOUT, 1>;

constexpr float kNoScore = -3e38f;  // of a pair that is hidden, for softmax
constexpr float kNoSilu = 1e30f;    // -score of one, for silu: exp gives infinity, and the weight is 0
constexpr float kInfinity = __builtin_inff();

template <typename T>
__aicore__ inline void Narrow(const LocalTensor<T>& to, const LocalTensor<float>& from, int32_t count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    Adds(to, from, 0.0f, count);
  } else {
    Cast(to, from, RoundMode::CAST_RINT, count);
  }
}

template <typename T>
__aicore__ inline void Widen(const LocalTensor<float>& to, const LocalTensor<T>& from, int32_t count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    Adds(to, from, 0.0f, count);
  } else {
    Cast(to, from, RoundMode::CAST_NONE, count);
  }
}

template <typename T>
__aicore__ inline void Zero(const LocalTensor<T>& to, int32_t count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    Duplicate(to, 0.0f, count);
  } else {
    // The bits of zero are the same in all types.
    Duplicate(to.template ReinterpretCast<half>(), static_cast<half>(0.0f), count);
  }
}

// Rows of `columns` numbers, `pitch` apart in global memory and `width` apart in UB; width is a multiple of 16.
template <typename T>
__aicore__ inline void LoadRows(Input& queue, const GlobalTensor<T>& from, int32_t rows, int32_t columns, int32_t width,
                                int64_t pitch) {
  auto to = queue.AllocTensor<T>();
  const uint32_t bytes = columns * sizeof(T);
  const uint32_t gap = (width * sizeof(T) - (bytes + 31) / 32 * 32) / 32;
  DataCopyPad(to, from,
              DataCopyExtParams{static_cast<uint16_t>(rows), bytes,
                                static_cast<uint32_t>((pitch - columns) * sizeof(T)), gap, 0},
              DataCopyPadExtParams<T>{});
  queue.EnQue(to);
}

// The way back, of what was enqueued last.
template <typename T>
__aicore__ inline void StoreRows(Output& queue, const GlobalTensor<T>& to, int32_t rows, int32_t columns, int32_t width,
                                 int64_t pitch) {
  auto from = queue.DeQue<T>();
  const uint32_t bytes = columns * sizeof(T);
  const uint32_t gap = (width * sizeof(T) - (bytes + 31) / 32 * 32) / 32;
  DataCopyPad(to, from,
              DataCopyExtParams{static_cast<uint16_t>(rows), bytes, gap,
                                static_cast<uint32_t>((pitch - columns) * sizeof(T)), 0});
  queue.FreeTensor(from);
}

template <typename T>
__aicore__ inline void StoreZeros(Output& queue, const GlobalTensor<T>& to, int32_t rows, int32_t columns,
                                  int64_t pitch) {
  auto zeros = queue.AllocTensor<T>();
  const int32_t width = RoundUp(columns, kColumnUnit);
  Zero(zeros, rows * width);
  queue.EnQue(zeros);
  StoreRows(queue, to, rows, columns, width, pitch);
}

// No weight for columns of a tile that no row of a slab sees. `room` is that of a buffer of the queue.
template <typename T>
__aicore__ inline void ClearColumns(Output& queue, const GlobalTensor<T>& tile, const Slab& slab, int32_t from,
                                    int32_t to, int32_t room) {
  if (from >= to) return;
  const int32_t most = room / RoundUp(to - from, kColumnUnit);
  for (int32_t row = 0; row < slab.rows; row += most) {
    StoreZeros(queue, tile[int64_t{slab.row + row} * kKeyBlock + from], Smaller(most, slab.rows - row), to - from,
               kKeyBlock);
  }
}

// x[r, c] = x[r, c] (* or -) rows[r], with rows as one block of 32 bytes each.
__aicore__ inline void TimesBlocks(const LocalTensor<float>& x, const LocalTensor<float>& blocks, int32_t rows,
                                   int32_t width) {
  const uint8_t pitch = static_cast<uint8_t>(width / 8);
  for (int32_t c = 0; c < width; c += kLanes) {
    Mul(x[c], x[c], blocks, Smaller(kLanes, width - c), rows, BinaryRepeatParams{1, 1, 0, pitch, pitch, 1});
  }
}
__aicore__ inline void MinusBlocks(const LocalTensor<float>& x, const LocalTensor<float>& blocks, int32_t rows,
                                   int32_t width) {
  const uint8_t pitch = static_cast<uint8_t>(width / 8);
  for (int32_t c = 0; c < width; c += kLanes) {
    Sub(x[c], x[c], blocks, Smaller(kLanes, width - c), rows, BinaryRepeatParams{1, 1, 0, pitch, pitch, 1});
  }
}

// Largest number, or sum, of the first columns of each row: whole repeats are folded into one, and reduced with what is
// left. `scratch` has 64 floats for each row, `other` one.
template <bool largest>
class RowReduction {
 public:
  __aicore__ inline static void Run(const LocalTensor<float>& found, const LocalTensor<float>& x, int32_t rows,
                                    int32_t columns, int32_t width, const LocalTensor<float>& scratch,
                                    const LocalTensor<float>& other) {
    const uint8_t pitch = static_cast<uint8_t>(width / 8);
    const int32_t whole = columns / kLanes, rest = columns % kLanes;
    if (whole > 1) {
      Fold(scratch, x, x[kLanes], rows, BinaryRepeatParams{1, 1, 1, 8, pitch, pitch});
      PipeBarrier<PIPE_V>();
      for (int32_t i = 2; i < whole; ++i) {
        Fold(scratch, scratch, x[i * kLanes], rows, BinaryRepeatParams{1, 1, 1, 8, 8, pitch});
        PipeBarrier<PIPE_V>();
      }
      Reduce(found, scratch, kLanes, rows, 8);
    } else if (whole == 1) {
      Reduce(found, x, kLanes, rows, pitch);
    }
    if (rest > 0 && whole == 0) {
      Reduce(found, x, rest, rows, pitch);
    } else if (rest > 0) {
      Reduce(other, x[whole * kLanes], rest, rows, pitch);
      PipeBarrier<PIPE_V>();
      if constexpr (largest) {
        Max(found, found, other, rows);
      } else {
        Add(found, found, other, rows);
      }
    }
    PipeBarrier<PIPE_V>();
  }

 private:
  __aicore__ inline static void Fold(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                     const LocalTensor<float>& b, int32_t rows, const BinaryRepeatParams& params) {
    if constexpr (largest) {
      Max(to, a, b, kLanes, static_cast<uint8_t>(rows), params);
    } else {
      Add(to, a, b, kLanes, static_cast<uint8_t>(rows), params);
    }
  }
  __aicore__ inline static void Reduce(const LocalTensor<float>& found, const LocalTensor<float>& x, int32_t mask,
                                       int32_t rows, int32_t pitch) {
    if constexpr (largest) {
      WholeReduceMax<float>(found, x, mask, rows, 1, 1, pitch, ReduceOrder::ORDER_ONLY_VALUE);
    } else {
      WholeReduceSum<float>(found, x, mask, rows, 1, 1, pitch);
    }
  }
};

}  // namespace turbogr
