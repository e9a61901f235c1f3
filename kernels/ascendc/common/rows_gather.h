// Rows by number: y[i] = x[rows[i]]. Only bytes move.
//
// Each core writes a range of rows of y, all cores as many. It reads a chunk of numbers, fills a buffer with the rows
// they name, one copy for each run of neighbours, and writes the buffer with one copy; four buffers are under way.
// A row that fits no buffer goes in pieces.
//
// Numbers are not checked: one outside of x reads what is not x's. Whoever calls the kernel answers for them.
#pragma once

#include "rows_common.h"

namespace turbogr {

template <typename T, typename Index>
class RowGather {
 public:
  __aicore__ inline RowGather(AscendC::TPipe* pipe, const RowGatherTiling& tiling) : pipe_(pipe), tiling_(tiling) {}

  __aicore__ inline void Run(GM_ADDR x, GM_ADDR rows, GM_ADDR result) {
    const RowRange mine = ShareOfRows(tiling_.count, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
    if (mine.begin == mine.end || tiling_.width == 0) {
      return;
    }
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    rows_.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(rows));
    result_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(result));
    pipe_->InitBuffer(indexBuffer_, kGatherIndices * sizeof(Index));
    pipe_->InitBuffer(queue_, kGatherBuffers, kGatherBytes);
    index_ = indexBuffer_.template Get<Index>();
    for (int64_t first = mine.begin; first < mine.end; first += kGatherIndices) {
      const int64_t count = Smaller(kGatherIndices, mine.end - first);
      LoadIndices(first, count);
      for (int64_t at = 0; at < count; at += tiling_.rowsPerCopy) {
        const int64_t rowCount = Smaller(tiling_.rowsPerCopy, count - at);
        for (int64_t column = 0; column < tiling_.width; column += tiling_.columnsPerCopy) {
          Copy(first, at, rowCount, column, Smaller(tiling_.columnsPerCopy, tiling_.width - column));
        }
      }
    }
  }

 private:
  __aicore__ inline void LoadIndices(int64_t first, int64_t count) {
    Fence<AscendC::HardEvent::S_MTE2>(pipe_);  // the chunk before has been read
    const uint32_t bytes = static_cast<uint32_t>(count * sizeof(Index));
    AscendC::DataCopyPad(index_, rows_[first], {1, bytes, 0, 0, 0}, AscendC::DataCopyPadExtParams<Index>());
    Fence<AscendC::HardEvent::MTE2_S>(pipe_);
  }

  // Rows `at`... of the chunk that starts at row `first` of the result. Rows of more than one piece come one by one, so
  // that neighbours are always whole, without a gap between them.
  __aicore__ inline void Copy(int64_t first, int64_t at, int64_t rowCount, int64_t column, int64_t columns) {
    const int64_t pitch = RoundUp(columns, kBlockBytes / sizeof(T));
    const uint32_t bytes = static_cast<uint32_t>(columns * sizeof(T));
    AscendC::LocalTensor<T> buffer = queue_.template AllocTensor<T>();
    for (int64_t i = 0; i < rowCount;) {
      const int64_t row = index_.GetValue(at + i);
      int64_t run = 1;
      while (i + run < rowCount && index_.GetValue(at + i + run) == row + run) {
        ++run;
      }
      AscendC::DataCopyPad(buffer[i * pitch], x_[row * tiling_.width + column],
                           {static_cast<uint16_t>(run), bytes, 0, 0, 0}, AscendC::DataCopyPadExtParams<T>());
      i += run;
    }
    queue_.EnQue(buffer);
    buffer = queue_.template DeQue<T>();
    AscendC::DataCopyPad(result_[(first + at) * tiling_.width + column], buffer,
                         {static_cast<uint16_t>(rowCount), bytes, 0, 0, 0});
    queue_.FreeTensor(buffer);
  }

  AscendC::TPipe* pipe_;
  RowGatherTiling tiling_;
  AscendC::GlobalTensor<T> x_;
  AscendC::GlobalTensor<Index> rows_;
  AscendC::GlobalTensor<T> result_;
  AscendC::TBuf<AscendC::TPosition::VECIN> indexBuffer_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> queue_;
  AscendC::LocalTensor<Index> index_;
};

}  // namespace turbogr
