// Biases of attention scores by distance and by time, added to a part of a tile.
//
//     position: table[query column - key column + M - 1]                 an address for each pair, then Gather
//     time:     table[number of bounds <= |query time - key time|]       a search for each pair, then Gather
//
// The search is exact in int32. A float of the gap is monotone in it, so that its cell, which is the exponent and two
// bits of the mantissa, tells bounds of lower cells to be below; a table has their number for each cell. Bounds of the
// same cell are told apart by bisection, with as many steps as the fullest cell needs: one or two where bounds grow
// exponentially. int32 has no Compare but EQ, so the sign bit decides.
#pragma once

#include "attention_shape.h"
#include "kernel_operator.h"

namespace turbogr {

using namespace AscendC;

constexpr int32_t kLanes = 64;  // numbers of four bytes in one repeat

__aicore__ inline int32_t RoundUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }
__aicore__ inline int32_t RoundDown(int32_t value, int32_t unit) { return value / unit * unit; }
__aicore__ inline int32_t Smaller(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t Larger(int32_t a, int32_t b) { return a > b ? a : b; }

template <typename T>
__aicore__ inline void CopyIn(const LocalTensor<T>& to, const GlobalTensor<T>& from, int32_t count) {
  DataCopyPad(to, from, DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0},
              DataCopyPadExtParams<T>{});
}

// dst[r, c] = rows[r] - keys[c]; rows come as one block of 32 bytes each, see Brcb. `width` is that of a row of dst.
template <typename T>
__aicore__ inline void RowsMinusKeys(const LocalTensor<T>& dst, const LocalTensor<T>& rows, const LocalTensor<T>& keys,
                                     int32_t count, int32_t width) {
  for (int32_t c = 0; c < width; c += kLanes) {
    Sub(dst[c], rows, keys[c], Smaller(kLanes, width - c), count,
        BinaryRepeatParams{1, 0, 1, static_cast<uint8_t>(width / 8), 1, 0});
  }
}

// Number of bounds at or below a gap, times four: the byte of its entry in a table of floats.
class TimeBuckets {
 public:
  // `scratch` has room for 2 * slots integers. Bounds ascend; 2^31 - 1 stands for all that no gap reaches.
  __aicore__ inline void Init(TPipe* pipe, const GlobalTensor<int32_t>& bounds, int32_t count, int32_t slots,
                              const LocalTensor<int32_t>& scratch) {
    pipe->InitBuffer(bounds_, slots * sizeof(int32_t));
    pipe->InitBuffer(cells_, kTimeCells * sizeof(int32_t));
    auto table = bounds_.Get<int32_t>();
    Duplicate(table, static_cast<int32_t>(0x7ffffffe), slots);
    if (count > 0) {
      CopyIn(scratch, bounds, count);
      const auto loaded = pipe->FetchEventID(HardEvent::MTE2_V);
      SetFlag<HardEvent::MTE2_V>(loaded);
      WaitFlag<HardEvent::MTE2_V>(loaded);
      PipeBarrier<PIPE_V>();
      // One less, so that the sign of the difference says "at or below".
      Adds(table, scratch, -1, count);
      auto cells = scratch[RoundUp(slots, 8)];
      Cast(cells.ReinterpretCast<float>(), scratch, RoundMode::CAST_RINT, count);
      PipeBarrier<PIPE_V>();
      ShiftRight(cells.ReinterpretCast<uint32_t>(), cells.ReinterpretCast<uint32_t>(),
                 static_cast<uint32_t>(kTimeCellShift), count);
    }
    const auto ready = pipe->FetchEventID(HardEvent::V_S);
    SetFlag<HardEvent::V_S>(ready);
    WaitFlag<HardEvent::V_S>(ready);
    CountCells(scratch[RoundUp(slots, 8)], count);
    const auto written = pipe->FetchEventID(HardEvent::S_V);
    SetFlag<HardEvent::S_V>(written);
    WaitFlag<HardEvent::S_V>(written);
    // The scratch is free again for whatever loads into it.
    const auto free = pipe->FetchEventID(HardEvent::V_MTE2);
    SetFlag<HardEvent::V_MTE2>(free);
    WaitFlag<HardEvent::V_MTE2>(free);
  }

  // `gaps` are overwritten by their magnitude; all three have `count` numbers. The result is in `entries`.
  __aicore__ inline void Find(const LocalTensor<int32_t>& gaps, const LocalTensor<int32_t>& entries,
                              const LocalTensor<int32_t>& scratch, int32_t count) {
    auto table = bounds_.Get<int32_t>();
    Muls(scratch, gaps, -1, count);
    PipeBarrier<PIPE_V>();
    Max(gaps, gaps, scratch, count);
    PipeBarrier<PIPE_V>();
    Cast(scratch.ReinterpretCast<float>(), gaps, RoundMode::CAST_RINT, count);
    PipeBarrier<PIPE_V>();
    ShiftRight(scratch.ReinterpretCast<uint32_t>(), scratch.ReinterpretCast<uint32_t>(),
               static_cast<uint32_t>(kTimeCellShift), count);
    PipeBarrier<PIPE_V>();
    Muls(scratch, scratch, 4, count);
    PipeBarrier<PIPE_V>();
    Gather(entries, cells_.Get<int32_t>(), scratch.ReinterpretCast<uint32_t>(), 0U, static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
    for (int32_t step = reach_; step > 0; step /= 2) {
      Gather(scratch, table, entries.ReinterpretCast<uint32_t>(), static_cast<uint32_t>(4 * (step - 1)),
             static_cast<uint32_t>(count));
      PipeBarrier<PIPE_V>();
      Sub(scratch, scratch, gaps, count);
      PipeBarrier<PIPE_V>();
      ShiftRight(scratch.ReinterpretCast<uint32_t>(), scratch.ReinterpretCast<uint32_t>(), 31U, count);
      PipeBarrier<PIPE_V>();
      Muls(scratch, scratch, 4 * step, count);
      PipeBarrier<PIPE_V>();
      Add(entries, entries, scratch, count);
      PipeBarrier<PIPE_V>();
    }
  }

 private:
  // For each cell the bounds of lower cells, times four; and the first step of the bisection.
  __aicore__ inline void CountCells(const LocalTensor<int32_t>& cells, int32_t count) {
    auto table = cells_.Get<int32_t>();
    int32_t bound = 0, most = 0;
    for (int32_t cell = 0; cell < kTimeCells; ++cell) {
      table.SetValue(cell, 4 * bound);
      const int32_t before = bound;
      while (bound < count && cells.GetValue(bound) == cell) ++bound;
      most = Larger(most, bound - before);
    }
    for (reach_ = 1; reach_ <= most; reach_ *= 2) {
    }
    reach_ /= 2;
  }

  TBuf<TPosition::VECCALC> bounds_, cells_;
  int32_t reach_ = 0;
};

}  // namespace turbogr
