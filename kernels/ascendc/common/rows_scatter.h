// Rows added up by number: y[rows[i]] += x[i], from zero, and one row of y may be left at zero.
//
// Each core owns a range of rows of y and writes them once, so there are no atomics, and each sum takes its rows in the
// order of x whatever the number of cores: bits do not depend on it. Sums are floats and are rounded once.
//
//   1. List. The core looks at all numbers, in chunks, and keeps the entries of its rows: (row of y, row of x).
//   2. Tiles. For as many rows of y as fit, sums start at zero; the entries of the tile are picked from the list,
//      their rows of x loaded, one copy for each run of neighbours, and added, one instruction for each run in y.
//
// A list that is full is started again for half of the rows; for the rows of one tile it is not needed: each chunk is
// added to the tile as it is found.
//
// Rows are compared as floats, relative to the first row of the span that is listed. int -> float is monotone, spans
// have at most 2^24 rows, and ints up to there are exact: a comparison with 0, with the end of a span, or with a row in
// it says the same for the float as for the int. 32-bit numbers outside of y are in no span: nothing is added for them.
#pragma once

#include "rows_common.h"

namespace turbogr {

template <typename T, typename Index>
class RowScatter {
  static constexpr bool kNarrow = sizeof(T) < sizeof(float);
  static constexpr int64_t kLanes = 64;  // comparisons take a multiple of so many floats
  static constexpr int64_t kBlockFloats = kBlockBytes / sizeof(float);

 public:
  __aicore__ inline RowScatter(AscendC::TPipe* pipe, const RowScatterTiling& tiling) : pipe_(pipe), tiling_(tiling) {}

  __aicore__ inline void Run(GM_ADDR x, GM_ADDR rows, GM_ADDR result) {
    const RowRange mine = ShareOfRows(tiling_.count, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
    if (mine.begin == mine.end || tiling_.width == 0) {
      return;
    }
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    rows_.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(rows));
    result_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(result));
    Init();
    int64_t span = kScatterSpan;
    for (int64_t first = mine.begin; first < mine.end;) {
      const int64_t rowCount = Smaller(span, mine.end - first);
      const bool listed = List(first, rowCount);
      if (!listed && rowCount > tiling_.tileRows) {
        span = rowCount / 2 > tiling_.tileRows ? rowCount / 2 : tiling_.tileRows;
        continue;
      }
      Sum(first, rowCount, listed);
      first += rowCount;
      span = Smaller(2 * span, kScatterSpan);
    }
  }

 private:
  __aicore__ inline void Init() {
    const int64_t widest = RoundUp(tiling_.tileColumns, kBlockBytes / sizeof(T));
    const uint32_t tileBytes = static_cast<uint32_t>(tiling_.tileRows * widest * sizeof(float));
    pipe_->InitBuffer(indexQueue_, 2, kScatterChunk * sizeof(Index));
    pipe_->InitBuffer(rowQueue_, 2, kScatterRowBytes);
    if constexpr (kNarrow) {
      pipe_->InitBuffer(resultQueue_, 2, kScatterRowBytes);
      pipe_->InitBuffer(tileBuffer_, tileBytes);
      pipe_->InitBuffer(wideBuffer_, kScatterRowBytes / sizeof(T) * sizeof(float));
      wide_ = wideBuffer_.template Get<float>();
    } else {
      pipe_->InitBuffer(resultQueue_, 2, tileBytes);
    }
    pipe_->InitBuffer(workBuffer_, 4 * kScatterChunk * sizeof(float));
    pipe_->InitBuffer(maskBuffer_, 3 * kScatterMaskBytes);
    pipe_->InitBuffer(listBuffer_, 2 * kScatterList * sizeof(float));
    place_ = workBuffer_.template GetWithOffset<int32_t>(kScatterChunk, 0);
    row_ = workBuffer_.template GetWithOffset<int32_t>(kScatterChunk, kScatterChunk * sizeof(float));
    rowFloat_ = workBuffer_.template GetWithOffset<float>(kScatterChunk, 2 * kScatterChunk * sizeof(float));
    entry_ = workBuffer_.template GetWithOffset<int32_t>(kScatterChunk, 3 * kScatterChunk * sizeof(float));
    for (int64_t i = 0; i < 3; ++i) {
      mask_[i] = maskBuffer_.template GetWithOffset<uint8_t>(kScatterMaskBytes, i * kScatterMaskBytes);
    }
    listRow_ = listBuffer_.template GetWithOffset<float>(kScatterList, 0);
    listEntry_ = listBuffer_.template GetWithOffset<int32_t>(kScatterList, kScatterList * sizeof(float));
    AscendC::CreateVecIndex(place_, 0, kScatterChunk);
  }

  // --- list ------------------------------------------------------------------------------------------

  // The entries of `rowCount` rows; false where they are too many. The next chunk is under way while one is looked at.
  __aicore__ inline bool List(int64_t first, int64_t rowCount) {
    listed_ = 0;
    Fetch(0);
    for (int64_t base = 0; base < tiling_.entries; base += kScatterChunk) {
      if (listed_ > kScatterListed) {
        AscendC::LocalTensor<Index> unread = indexQueue_.template DeQue<Index>();
        indexQueue_.FreeTensor(unread);
        return false;
      }
      Fetch(base + kScatterChunk);
      Append(first, rowCount, base);
    }
    Close();
    return true;
  }

  __aicore__ inline void Fetch(int64_t base) {
    if (base >= tiling_.entries) {
      return;
    }
    const uint32_t bytes = static_cast<uint32_t>(Smaller(kScatterChunk, tiling_.entries - base) * sizeof(Index));
    AscendC::LocalTensor<Index> index = indexQueue_.template AllocTensor<Index>();
    AscendC::DataCopyPad(index, rows_[base], {1, bytes, 0, 0, 0}, AscendC::DataCopyPadExtParams<Index>());
    indexQueue_.EnQue(index);
  }

  // Lists the entries of one chunk that belong to the rows first, first + 1, ...
  __aicore__ inline void Append(int64_t first, int64_t rowCount, int64_t base) {
    const int32_t count = static_cast<int32_t>(Smaller(kScatterChunk, tiling_.entries - base));
    const int32_t padded = static_cast<int32_t>(RoundUp(count, kLanes));
    AscendC::LocalTensor<Index> index = indexQueue_.template DeQue<Index>();
    if constexpr (sizeof(Index) == sizeof(int64_t)) {
      AscendC::Cast(row_, index, AscendC::RoundMode::CAST_NONE, count);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Adds(row_, row_, static_cast<int32_t>(-first), count);
    } else {
      AscendC::Adds(row_, index, static_cast<int32_t>(-first), count);
    }
    indexQueue_.FreeTensor(index);
    if (padded > count) {  // compared, and then not looked at
      AscendC::Duplicate(rowFloat_[padded - kLanes], kNone, kLanes);
    }
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Cast(rowFloat_, row_, AscendC::RoundMode::CAST_RINT, count);
    AscendC::PipeBarrier<PIPE_V>();
    Within(rowFloat_, 0, rowCount, padded);
    const int64_t skip = tiling_.skip - first;
    if (0 <= skip && skip < rowCount) {
      AscendC::CompareScalar(mask_[2], rowFloat_, static_cast<float>(skip), AscendC::CMPMODE::NE, padded);
      AscendC::PipeBarrier<PIPE_V>();
      Both(mask_[0], mask_[2], padded);
    }
    const int32_t kept = Keep(listRow_[listed_], rowFloat_, listEntry_[listed_], place_, count);
    if (kept == 0) {
      return;
    }
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(listEntry_[listed_], listEntry_[listed_], static_cast<int32_t>(base), kept);
    AscendC::PipeBarrier<PIPE_V>();
    // The next chunk is listed from the next block on: what is left of this one belongs to no row.
    const int64_t last = kept % kBlockFloats;
    if (last != 0) {
      const int64_t block = listed_ + kept - last;
      uint64_t left[2] = {(uint64_t(0xff) << last) & 0xff, 0};
      AscendC::Duplicate(listRow_[block], kNone, left, 1, 1, 8);
      AscendC::Duplicate(listEntry_[block], int32_t(0), left, 1, 1, 8);
    }
    listed_ += RoundUp(kept, kBlockFloats);
  }

  // What comparisons read behind the list.
  __aicore__ inline void Close() {
    const int64_t padded = RoundUp(listed_, kLanes);
    if (padded > listed_) {
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Duplicate(listRow_[listed_], kNone, static_cast<int32_t>(padded - listed_));
    }
  }

  // mask_[0]: which rows are at least `first` and below `first + rowCount`.
  __aicore__ inline void Within(const AscendC::LocalTensor<float>& rows, int64_t first, int64_t rowCount,
                                int32_t padded) {
    AscendC::CompareScalar(mask_[0], rows, static_cast<float>(first), AscendC::CMPMODE::GE, padded);
    AscendC::CompareScalar(mask_[1], rows, static_cast<float>(first + rowCount), AscendC::CMPMODE::LT, padded);
    AscendC::PipeBarrier<PIPE_V>();
    Both(mask_[0], mask_[1], padded);
  }

  __aicore__ inline void Both(const AscendC::LocalTensor<uint8_t>& into, const AscendC::LocalTensor<uint8_t>& other,
                              int32_t bits) {
    AscendC::LocalTensor<uint16_t> words = into.template ReinterpretCast<uint16_t>();
    AscendC::And(words, words, other.template ReinterpretCast<uint16_t>(), bits / 16);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // Rows and entries whose bit of mask_[0] is set, one behind the other, and how many they are.
  __aicore__ inline int32_t Keep(const AscendC::LocalTensor<float>& keptRow, const AscendC::LocalTensor<float>& row,
                                 const AscendC::LocalTensor<int32_t>& keptEntry,
                                 const AscendC::LocalTensor<int32_t>& entry, int32_t count) {
    const AscendC::LocalTensor<uint32_t> bits = mask_[0].template ReinterpretCast<uint32_t>();
    const AscendC::GatherMaskParams dense(1, 1, 8, 8);
    uint64_t kept = 0;
    AscendC::GatherMask(keptRow, row, bits, true, static_cast<uint32_t>(count), dense, kept);
    AscendC::GatherMask(keptEntry, entry, bits, true, static_cast<uint32_t>(count), dense, kept);
    return static_cast<int32_t>(kept);
  }

  // --- tiles -----------------------------------------------------------------------------------------

  __aicore__ inline void Sum(int64_t first, int64_t rowCount, bool listed) {
    for (int64_t row = 0; row < rowCount; row += tiling_.tileRows) {
      const int64_t count = Smaller(tiling_.tileRows, rowCount - row);
      for (int64_t column = 0; column < tiling_.width; column += tiling_.tileColumns) {
        column_ = column;
        columns_ = Smaller(tiling_.tileColumns, tiling_.width - column);
        pitch_ = RoundUp(columns_, kBlockBytes / sizeof(T));
        Begin(count);
        if (listed) {
          AddListed(row, count);
        } else {
          AddFound(first, count);
        }
        Finish(first + row, count);
      }
    }
  }

  __aicore__ inline void Begin(int64_t rowCount) {
    if constexpr (kNarrow) {
      sums_ = tileBuffer_.template Get<float>();
      AscendC::PipeBarrier<PIPE_V>();  // the tile before has been rounded
    } else {
      sums_ = resultQueue_.template AllocTensor<float>();
    }
    AscendC::Duplicate(sums_, 0.0f, static_cast<int32_t>(rowCount * pitch_));
  }

  // One tile, and no list of all its entries.
  __aicore__ inline void AddFound(int64_t first, int64_t rowCount) {
    Fetch(0);
    for (int64_t base = 0; base < tiling_.entries; base += kScatterChunk) {
      listed_ = 0;
      Fetch(base + kScatterChunk);
      Append(first, rowCount, base);
      Close();
      AddListed(0, rowCount);
    }
  }

  // Adds what the list has for rows of the tile, which starts at row `tile` of the span.
  __aicore__ inline void AddListed(int64_t tile, int64_t rowCount) {
    for (int64_t base = 0; base < listed_; base += kScatterChunk) {
      const int32_t count = static_cast<int32_t>(Smaller(kScatterChunk, listed_ - base));
      AscendC::PipeBarrier<PIPE_V>();
      Within(listRow_[base], tile, rowCount, static_cast<int32_t>(RoundUp(count, kLanes)));
      const int32_t kept = Keep(rowFloat_, listRow_[base], entry_, listEntry_[base], count);
      if (kept == 0) {
        continue;
      }
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Adds(rowFloat_, rowFloat_, static_cast<float>(-tile), kept);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Cast(row_, rowFloat_, AscendC::RoundMode::CAST_RINT, kept);
      Fence<AscendC::HardEvent::V_S>(pipe_);
      for (int64_t at = 0; at < kept; at += tiling_.rowsPerLoad) {
        const int64_t loaded = Smaller(tiling_.rowsPerLoad, kept - at);
        Load(at, loaded);
        Add(at, loaded);
      }
      Fence<AscendC::HardEvent::S_V>(pipe_);  // rows and entries have been read
    }
  }

  // Rows entry_[at], entry_[at + 1], ... of x.
  __aicore__ inline void Load(int64_t at, int64_t rowCount) {
    AscendC::DataCopyPadExtParams<T> pad;
    pad.isPad = pitch_ > columns_;
    pad.rightPadding = static_cast<uint8_t>(pitch_ - columns_);
    const uint32_t bytes = static_cast<uint32_t>(columns_ * sizeof(T));
    const uint32_t gap = static_cast<uint32_t>((tiling_.width - columns_) * sizeof(T));
    AscendC::LocalTensor<T> loaded = rowQueue_.template AllocTensor<T>();
    for (int64_t i = 0; i < rowCount;) {
      const int64_t entry = entry_.GetValue(at + i);
      int64_t run = 1;
      while (i + run < rowCount && entry_.GetValue(at + i + run) == entry + run) {
        ++run;
      }
      AscendC::DataCopyPad(loaded[i * pitch_], x_[entry * tiling_.width + column_],
                           {static_cast<uint16_t>(run), bytes, gap, 0, 0}, pad);
      i += run;
    }
    rowQueue_.EnQue(loaded);
  }

  // Adds what was loaded to the rows row_[at], row_[at + 1], ... of the tile.
  __aicore__ inline void Add(int64_t at, int64_t rowCount) {
    AscendC::LocalTensor<T> loaded = rowQueue_.template DeQue<T>();
    AscendC::PipeBarrier<PIPE_V>();
    if constexpr (kNarrow) {
      AscendC::Cast(wide_, loaded, AscendC::RoundMode::CAST_NONE, static_cast<int32_t>(rowCount * pitch_));
      rowQueue_.FreeTensor(loaded);
      AscendC::PipeBarrier<PIPE_V>();
      AddRuns(wide_, at, rowCount);
    } else {
      AddRuns(loaded, at, rowCount);
      rowQueue_.FreeTensor(loaded);
    }
  }

  __aicore__ inline void AddRuns(const AscendC::LocalTensor<float>& source, int64_t at, int64_t rowCount) {
    int64_t highest = -1;  // since the last barrier: only a row that is not above it may have been added to
    for (int64_t i = 0; i < rowCount;) {
      const int64_t row = row_.GetValue(at + i);
      int64_t run = 1;
      while (i + run < rowCount && row_.GetValue(at + i + run) == row + run) {
        ++run;
      }
      if (row <= highest) {
        AscendC::PipeBarrier<PIPE_V>();
      }
      highest = row + run - 1;
      AscendC::LocalTensor<float> sums = sums_[row * pitch_];
      AscendC::Add(sums, sums, source[i * pitch_], static_cast<int32_t>(run * pitch_));
      i += run;
    }
  }

  __aicore__ inline void Finish(int64_t first, int64_t rowCount) {
    if constexpr (kNarrow) {
      AscendC::PipeBarrier<PIPE_V>();
      for (int64_t row = 0; row < rowCount; row += tiling_.rowsPerLoad) {
        const int64_t count = Smaller(tiling_.rowsPerLoad, rowCount - row);
        AscendC::LocalTensor<T> rounded = resultQueue_.template AllocTensor<T>();
        AscendC::Cast(rounded, sums_[row * pitch_], AscendC::RoundMode::CAST_RINT,
                      static_cast<int32_t>(count * pitch_));
        Store(rounded, first + row, count);
      }
    } else {
      Store(sums_, first, rowCount);
    }
  }

  __aicore__ inline void Store(AscendC::LocalTensor<T>& rows, int64_t first, int64_t rowCount) {
    const uint32_t bytes = static_cast<uint32_t>(columns_ * sizeof(T));
    const uint32_t gap = static_cast<uint32_t>((tiling_.width - columns_) * sizeof(T));
    resultQueue_.EnQue(rows);
    AscendC::LocalTensor<T> ready = resultQueue_.template DeQue<T>();
    AscendC::DataCopyPad(result_[first * tiling_.width + column_], ready,
                         {static_cast<uint16_t>(rowCount), bytes, 0, gap, 0});
    resultQueue_.FreeTensor(ready);
  }

  static constexpr float kNone = -1.0f;  // is in no span and in no tile

  AscendC::TPipe* pipe_;
  RowScatterTiling tiling_;
  AscendC::GlobalTensor<T> x_;
  AscendC::GlobalTensor<Index> rows_;
  AscendC::GlobalTensor<T> result_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> indexQueue_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> rowQueue_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> resultQueue_;  // rounded rows, or the tile where there is no rounding
  AscendC::TBuf<AscendC::TPosition::VECCALC> tileBuffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> wideBuffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> workBuffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> maskBuffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> listBuffer_;

  // A chunk of entries: 0, 1, 2, ...; their rows; the same as floats; and those that were picked from the list.
  AscendC::LocalTensor<int32_t> place_;
  AscendC::LocalTensor<int32_t> row_;
  AscendC::LocalTensor<float> rowFloat_;
  AscendC::LocalTensor<int32_t> entry_;
  AscendC::LocalTensor<uint8_t> mask_[3];

  // The list: rows from the first of the span, rows of x, ascending; and its length.
  AscendC::LocalTensor<float> listRow_;
  AscendC::LocalTensor<int32_t> listEntry_;
  int64_t listed_;

  // The tile: its sums, its columns, and floats from row to row.
  AscendC::LocalTensor<float> sums_;
  AscendC::LocalTensor<float> wide_;
  int64_t column_;
  int64_t columns_;
  int64_t pitch_;
};

}  // namespace turbogr
