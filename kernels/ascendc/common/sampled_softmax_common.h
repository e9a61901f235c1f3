// What sampled_softmax and its backward share on the device: tiles of logits in turn, and what is done to rows.
#pragma once

#include "group_walk.h"
#include "kernel_operator.h"
#include "lib/matmul_intf.h"
#include "sampled_softmax_sizes.h"

namespace turbogr {

constexpr int32_t kLanes = 64;      // floats of a repeat
constexpr int32_t kBlockFloats = 8; // of a block of 32 bytes
constexpr float kLowest = -3.0e38f; // the logit of a negative that is left out

__aicore__ inline int32_t Lesser(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t RoundedUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }
// Parts of nearly equal size, none above `most`, all but the last a multiple of 8: the size of a part.
__aicore__ inline int32_t EvenPart(int32_t count, int32_t most) {
  const int32_t parts = (count + most - 1) / most;
  return RoundedUp((count + parts - 1) / parts, 8);
}

__aicore__ inline void Settle() { PipeBarrier<PIPE_V>(); }

// --- tiles in turn -----------------------------------------------------------------------------------

// A tile of logits: a block of own rows, and some of the other rows it meets.
struct Task {
  Unit unit;
  int32_t column;   // of the tile, counted from the first other row
  int32_t columns;  // none where there is nothing to meet
  int32_t slot;     // of rings, by tile
  int32_t set;      // of what is kept for a unit, by unit
  bool head, last;  // of its unit
};

template <typename Index>
class Tasks {
 public:
  __aicore__ inline void Init(TPipe* pipe, int32_t groups) { walk_.Init(pipe, groups); }

  __aicore__ inline void Start(const GlobalTensor<Index>& own, const GlobalTensor<Index>& other,
                               const SampledSweep& sweep, bool paired) {
    walk_.Start(own, other, sweep.block, sweep.loadRows, paired);
    tile_ = sweep.tile;
    task_.slot = task_.set = 0;
    task_.last = true;
  }

  __aicore__ inline bool Next(Task* task) {
    if (task_.last) {
      if (!walk_.Next(&task_.unit)) {
        return false;
      }
      task_.head = true;
      task_.column = 0;
      task_.set ^= 1;
    } else {
      task_.head = false;
      task_.column += task_.columns;
    }
    const int32_t left = task_.unit.otherCount - task_.column;
    task_.columns = Lesser(left, tile_);
    task_.last = left <= tile_;
    task_.slot ^= 1;
    *task = task_;
    return true;
  }

 private:
  GroupWalk<Index> walk_;
  Task task_;
  int32_t tile_;
};

// --- rows of floats ----------------------------------------------------------------------------------
// `pitch` is the distance of rows in floats, a multiple of 8; rows are at most 255.

__aicore__ inline BinaryRepeatParams Strides(int32_t dst, int32_t src0, int32_t src1) {
  return {1, 1, 1, static_cast<uint8_t>(dst / kBlockFloats), static_cast<uint8_t>(src0 / kBlockFloats),
          static_cast<uint8_t>(src1 / kBlockFloats)};
}

// The second source has one block for each row.
__aicore__ inline BinaryRepeatParams ByRow(int32_t pitch) {
  BinaryRepeatParams strides = Strides(pitch, pitch, kBlockFloats);
  strides.src1BlkStride = 0;
  return strides;
}

// The second source has one row for all.
__aicore__ inline BinaryRepeatParams ByColumn(int32_t pitch) { return Strides(pitch, pitch, 0); }

__aicore__ inline UnaryRepeatParams RowStrides(int32_t dst, int32_t src) {
  return {1, 1, static_cast<uint8_t>(dst / kBlockFloats), static_cast<uint8_t>(src / kBlockFloats)};
}

// Each number fills a block: `count` numbers, rounded up to 8.
template <typename T>
__aicore__ inline void Spread(const LocalTensor<T>& blocks, const LocalTensor<T>& numbers, int32_t count) {
  Brcb(blocks, numbers, static_cast<uint8_t>((count + 7) / 8), {1, 8});
}

__aicore__ inline void MultiplyRows(const LocalTensor<float>& x, const LocalTensor<float>& blocks, int32_t rows,
                                    int32_t width) {
  for (int32_t c = 0; c < width; c += kLanes) {
    Mul(x[c], x[c], blocks, Lesser(kLanes, width - c), rows, ByRow(width));
  }
}

template <bool sum>
__aicore__ inline void FoldLanes(const LocalTensor<float>& fold, const LocalTensor<float>& a,
                                 const LocalTensor<float>& b, int32_t lanes, int32_t rows,
                                 const BinaryRepeatParams& strides) {
  if constexpr (sum) {
    Add(fold, a, b, lanes, rows, strides);
  } else {
    Max(fold, a, b, lanes, rows, strides);
  }
}

// One number for each row. `fold` has 64 floats for each, where rows are wider than that.
template <bool sum>
__aicore__ inline void ReduceRows(const LocalTensor<float>& result, const LocalTensor<float>& x,
                                  const LocalTensor<float>& fold, int32_t rows, int32_t width) {
  if (width > kLanes) {
    int32_t c = kLanes;
    if (width < 2 * kLanes) {
      Adds(fold, x, 0.0f, kLanes, rows, RowStrides(kLanes, width));
    } else {
      FoldLanes<sum>(fold, x, x[c], kLanes, rows, Strides(kLanes, width, width));
      c += kLanes;
    }
    Settle();
    for (; c < width; c += kLanes) {
      FoldLanes<sum>(fold, fold, x[c], Lesser(kLanes, width - c), rows, Strides(kLanes, kLanes, width));
      Settle();
    }
  }
  const LocalTensor<float> last = width > kLanes ? fold : x;
  const int32_t lanes = Lesser(kLanes, width);
  const int32_t pitch = Lesser(kLanes, width) / kBlockFloats;
  if constexpr (sum) {
    WholeReduceSum<float>(result, last, lanes, rows, 1, 1, pitch);
  } else {
    WholeReduceMax<float>(result, last, lanes, rows, 1, 1, pitch, ReduceOrder::ORDER_ONLY_VALUE);
  }
}

// Lanes `from`... of 64, in each of some rows.
template <typename T>
__aicore__ inline void FillLanes(const LocalTensor<T>& x, T value, int32_t from, int32_t rows, int32_t pitch) {
  uint64_t mask[2] = {~uint64_t{0} << from, 0};
  Duplicate(x, value, mask, static_cast<uint8_t>(rows), 1, static_cast<uint8_t>(pitch / kBlockFloats));
}

template <typename T>
__aicore__ inline void Widen(const LocalTensor<float>& wide, const LocalTensor<T>& x, int32_t count) {
  if constexpr (IsSameType<T, float>::value) {
    Muls(wide, x, 1.0f, count);
  } else {
    Cast(wide, x, RoundMode::CAST_NONE, count);
  }
}

template <typename T>
__aicore__ inline void Narrowed(const LocalTensor<T>& x, const LocalTensor<float>& wide, int32_t count) {
  if constexpr (IsSameType<T, float>::value) {
    Muls(x, wide, 1.0f, count);
  } else {
    Cast(x, wide, RoundMode::CAST_RINT, count);
  }
}

using InQueue = TQue<TPosition::VECIN, 1>;

// --- accidental hits ---------------------------------------------------------------------------------

// Ids of the rows of a block and of the columns of a tile, and the place where they are compared.
class HitMask {
 public:
  __aicore__ inline void Init(TPipe* pipe, int32_t rows, int32_t columns, int32_t elements) {
    pipe->InitBuffer(rowQueue_, 1, rows * sizeof(int32_t));
    pipe->InitBuffer(columnQueue_, 1, columns * sizeof(int32_t));
    pipe->InitBuffer(blockBuffer_, rows * 32);
    pipe->InitBuffer(bitBuffer_, elements / 8);
    pipe->InitBuffer(lowBuffer_, 32);
    blocks_ = blockBuffer_.Get<int32_t>();
    bits_ = bitBuffer_.Get<uint8_t>();
    low_ = lowBuffer_.Get<float>();
    Duplicate(low_, kLowest, kBlockFloats);
  }

  __aicore__ inline void LoadRows(const GlobalTensor<int32_t>& ids, int32_t rows) {
    LocalTensor<int32_t> loaded = Load(rowQueue_, ids, rows);
    Spread(blocks_, loaded, rows);
    rowQueue_.FreeTensor(loaded);
  }

  __aicore__ inline void LoadColumns(const GlobalTensor<int32_t>& ids, int32_t columns) {
    columns_ = Load(columnQueue_, ids, columns);
    if (columns % kLanes) {
      // Compare looks at all lanes of a repeat.
      FillLanes(columns_[columns / kLanes * kLanes], 0, columns % kLanes, 1, kLanes);
    }
    Settle();
  }

  __aicore__ inline void FreeColumns() { columnQueue_.FreeTensor(columns_); }

  // Logits of the block's rows from `row` on and of the tile's columns from `column` on.
  __aicore__ inline void Drop(const LocalTensor<float>& x, int32_t row, int32_t rows, int32_t column, int32_t columns,
                              int32_t pitch) {
    const int32_t bytes = RoundedUp(rows, 4) * 8;  // of the bits of 64 columns: 8 for each row, whole blocks
    int32_t at = 0;
    for (int32_t c = 0; c < columns; c += kLanes, at += bytes) {
      BinaryRepeatParams strides = Strides(kLanes, 0, kBlockFloats);
      strides.src1BlkStride = 0;
      Compare(bits_[at], columns_[column + c], blocks_[row * kBlockFloats], CMPMODE::EQ, uint64_t{kLanes},
              static_cast<uint8_t>(rows), strides);
    }
    Settle();
    at = 0;
    for (int32_t c = 0; c < columns; c += kLanes, at += bytes) {
      BinaryRepeatParams strides = Strides(pitch, 0, pitch);
      strides.src0BlkStride = 0;
      Select(x[c], bits_[at], low_, x[c], SELMODE::VSEL_TENSOR_TENSOR_MODE,
             static_cast<uint64_t>(Lesser(kLanes, columns - c)), static_cast<uint8_t>(rows), strides);
    }
    Settle();
  }

 private:
  __aicore__ inline LocalTensor<int32_t> Load(InQueue& queue, const GlobalTensor<int32_t>& ids, int32_t count) {
    LocalTensor<int32_t> loaded = queue.AllocTensor<int32_t>();
    const uint32_t bytes = count * sizeof(int32_t);
    DataCopyPad(loaded, ids, DataCopyExtParams{1, bytes, 0, 0, 0}, DataCopyPadExtParams<int32_t>{false, 0, 0, 0});
    queue.EnQue(loaded);
    return queue.DeQue<int32_t>();
  }

  InQueue rowQueue_, columnQueue_;
  TBuf<TPosition::VECCALC> blockBuffer_, bitBuffer_, lowBuffer_;
  LocalTensor<int32_t> blocks_, columns_;
  LocalTensor<uint8_t> bits_;
  LocalTensor<float> low_;
};

// --- rows in global memory ---------------------------------------------------------------------------

// Elements as floats, `count` of them: a multiple of 16.
template <typename T>
__aicore__ inline void LoadWide(InQueue& queue, const LocalTensor<float>& wide, const GlobalTensor<T>& x,
                                int32_t count) {
  LocalTensor<T> loaded = queue.template AllocTensor<T>();
  DataCopy(loaded, x, count);
  queue.EnQue(loaded);
  loaded = queue.template DeQue<T>();
  Widen(wide, loaded, count);
  queue.FreeTensor(loaded);
}

// Some logits of a tile; in the unified buffer, rows are `pitch` floats apart, in the tile `tile`.
__aicore__ inline LocalTensor<float> LoadStrip(InQueue& queue, const GlobalTensor<float>& logits, int32_t rows,
                                               int32_t columns, int32_t pitch, int32_t tile) {
  LocalTensor<float> x = queue.AllocTensor<float>();
  const uint32_t bytes = columns * sizeof(float), between = (tile - columns) * sizeof(float);
  const uint32_t gap = (pitch - RoundedUp(columns, kBlockFloats)) / kBlockFloats;
  DataCopyPad(x, logits, DataCopyExtParams{static_cast<uint16_t>(rows), bytes, between, gap, 0},
              DataCopyPadExtParams<float>{false, 0, 0, 0});
  queue.EnQue(x);
  return queue.DeQue<float>();
}

// Elements of one core: all cores have as many, or one less.
struct Share {
  int64_t begin, end;
};

__aicore__ inline Share OwnShare(int64_t begin, int64_t end) {
  const int64_t cores = GetBlockNum() * GetTaskRation(), core = GetBlockIdx();
  return {begin + (end - begin) * core / cores, begin + (end - begin) * (core + 1) / cores};
}

// Zeros for elements begin...end of `to`, by all cores together; `queue` has buffers of `bytes`.
template <typename T, int32_t depth>
__aicore__ inline void WriteZeros(const GlobalTensor<T>& to, int64_t begin, int64_t end,
                                  TQue<TPosition::VECOUT, depth>& queue, int64_t bytes) {
  const Share share = OwnShare(begin, end);
  if (share.begin >= share.end) {
    return;
  }
  const int64_t most = bytes / static_cast<int64_t>(sizeof(T));
  LocalTensor<T> zeros = queue.template AllocTensor<T>();
  Duplicate(zeros.template ReinterpretCast<int32_t>(), 0, static_cast<int32_t>(bytes / sizeof(int32_t)));
  queue.EnQue(zeros);
  zeros = queue.template DeQue<T>();
  for (int64_t at = share.begin; at < share.end; at += most) {
    const int64_t count = share.end - at < most ? share.end - at : most;
    DataCopyPad(to[at], zeros, DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
  }
  queue.FreeTensor(zeros);
}

}  // namespace turbogr
