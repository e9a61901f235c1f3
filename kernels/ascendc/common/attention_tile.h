// What is known of rows and columns of a tile of scores: who sees whom, biases, and who is dropped.
//
// Columns of the padded batch ascend within a sequence, so what a query sees is a run of keys, with holes where
// key_valid says so. The vector unit takes a tile in slabs of rows. Where the tile crosses the edge of what is visible,
// a slab is as wide as the keys that any of its rows sees, and the rest is masked. Other tiles need no mask.
#pragma once

#include "attention_dropout.h"
#include "attention_pairs.h"

namespace turbogr {

constexpr float kHiddenColumn = 1e30f;  // column of a key that nobody sees

// How far a run of ascending columns stays below a limit; columns without holes are found at once.
template <typename Columns>
__aicore__ inline int32_t CountBelow(const Columns& columns, int32_t count, int64_t limit) {
  if (count == 0) return 0;
  const int64_t guess = limit - static_cast<int64_t>(columns.GetValue(0));
  if (guess <= 0) return 0;
  int32_t low = 0, high = count;  // the answer is in [low, high]
  if (guess < count) {
    const int32_t at = static_cast<int32_t>(guess);
    high = at;  // columns ascend by one at least
    if (static_cast<int64_t>(columns.GetValue(at - 1)) < limit) return at;
  } else if (static_cast<int64_t>(columns.GetValue(count - 1)) < limit) {
    return count;
  }
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (static_cast<int64_t>(columns.GetValue(middle)) < limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// What tells rows and keys of a tile apart, in global memory.
template <typename Index>
struct TileInputs {
  GlobalTensor<Index> queryColumns, keyColumns;
  GlobalTensor<uint8_t> keyValid, pairMask;
  GlobalTensor<float> bias, positionBias, timeBias;
  GlobalTensor<int32_t> timeBounds, queryTimes, keyTimes;
  GlobalTensor<int64_t> dropoutSeed;
};

template <typename Index>
class AttentionTile {
 public:
  // `scratch` is not used by others meanwhile; it holds a slab of floats, as the scratch of later calls.
  __aicore__ inline void Init(TPipe* pipe, const AttentionShape& shape, const TileInputs<Index>& inputs,
                              const LocalTensor<float>& scratch) {
    pipe_ = pipe;
    shape_ = shape;
    inputs_ = inputs;
    hasPosition_ = shape.positionEntries > 0;
    hasTime_ = shape.timeHeads > 0;
    masks_ = shape.minDistance > -kFarColumn || shape.maxDistance < kFarColumn || shape.hasValid;
    loaded_ = pipe->AllocEventID<HardEvent::MTE2_S>();
    pairs_.Init(pipe, shape, inputs.bias, inputs.pairMask);
    dropout_.Init(pipe, shape, inputs.dropoutSeed);
    if (!masks_ && !Informed()) return;
    keyTimesAt_ = (kKeyBlock + kRowBlock) * sizeof(Index);
    keyValidAt_ = keyTimesAt_ + (hasTime_ ? (kKeyBlock + kRowBlock) * sizeof(int32_t) : 0);
    pipe->InitBuffer(info_, 2, keyValidAt_ + (shape.hasValid ? kKeyBlock : 0));
    pipe->InitBuffer(columns_, (kKeyBlock + kRowBlock) * sizeof(int32_t));
    if (masks_) {
      pipe->InitBuffer(keyFloats_, (kKeyBlock + kLanes) * sizeof(float));  // see Hide
      pipe->InitBuffer(rowFloats_, kRowBlock * sizeof(float));
      pipe->InitBuffer(rowLimits_, 2 * kRowBlock * 32);
      pipe->InitBuffer(bits_, 2 * shape.slab / 8 + 2 * kRowBlock * 8);
      pipe->InitBuffer(hidden_, 32);
    }
    if (hasPosition_) pipe->InitBuffer(rowPlaces_, kRowBlock * 32);
    if (hasTime_) {
      pipe->InitBuffer(keyTimes_, kKeyBlock * sizeof(int32_t));
      pipe->InitBuffer(rowTimes_, kRowBlock * 32);
      buckets_.Init(pipe, inputs.timeBounds, shape.timeBounds, shape.boundSlots, scratch.ReinterpretCast<int32_t>());
    }
    if (hasPosition_ || hasTime_) pipe->InitBuffer(tables_, 1, TableBytes(shape));
  }

  __aicore__ inline static int32_t TableBytes(const AttentionShape& shape) {
    const int32_t time = shape.timeHeads > 0 ? RoundUp(shape.timeBounds + 1, 8) : 0;
    return (RoundUp(shape.positionEntries, 8) + time) * 4;
  }

  // Loads what is to be known of a tile, ahead of its time; at most one tile is ahead.
  __aicore__ inline void Fetch(const Step& step) {
    if (!Needs(step)) return;
    auto info = info_.AllocTensor<uint8_t>();
    // The scalar unit has read what this overwrites.
    const auto read = pipe_->FetchEventID(HardEvent::S_MTE2);
    SetFlag<HardEvent::S_MTE2>(read);
    WaitFlag<HardEvent::S_MTE2>(read);
    CopyIn(info.ReinterpretCast<Index>(), inputs_.keyColumns[step.keyRow], step.keys);
    CopyIn(info[kKeyBlock * sizeof(Index)].template ReinterpretCast<Index>(), inputs_.queryColumns[step.queryRow],
           step.rows);
    if (hasTime_) {
      auto times = info[keyTimesAt_].template ReinterpretCast<int32_t>();
      CopyIn(times, inputs_.keyTimes[step.keyRow], step.keys);
      CopyIn(times[kKeyBlock], inputs_.queryTimes[step.queryRow], step.rows);
    }
    if (shape_.hasValid) CopyIn(info[keyValidAt_], inputs_.keyValid[step.keyRow], step.keys);
    SetFlag<HardEvent::MTE2_S>(loaded_);
    info_.EnQue(info);
  }

  // Begins a tile: from here on Cut may be called.
  __aicore__ inline void Begin(const Step& step) {
    step_ = step;
    begun_ = Needs(step);
    masked_ = step.lower || step.upper;
    if (!begun_) return;
    WaitFlag<HardEvent::MTE2_S>(loaded_);
    current_ = info_.DeQue<uint8_t>();
    keyColumns_ = current_.template ReinterpretCast<Index>();
    queryColumns_ = current_[kKeyBlock * sizeof(Index)].template ReinterpretCast<Index>();
  }

  // Puts rows and keys where the vector unit wants them. `scratch` holds two times kKeyBlock floats.
  __aicore__ inline void Prepare(const LocalTensor<float>& scratch) {
    if (!begun_) return;
    if (hasPosition_ || hasTime_) LoadTables();
    auto keys = columns_.Get<int32_t>();
    auto rows = keys[kKeyBlock];
    PadKeys(keys, step_.column);
    ToInt32(keys, keyColumns_, step_.keys);
    ToInt32(rows, queryColumns_, step_.rows);
    if (hasTime_) {
      auto times = current_[keyTimesAt_].template ReinterpretCast<int32_t>();
      auto keyTimes = keyTimes_.Get<int32_t>();
      PadKeys(keyTimes, 0);
      Adds(keyTimes, times, 0, step_.keys);
      Spread(rowTimes_.Get<int32_t>(), times[kKeyBlock]);
    }
    PipeBarrier<PIPE_V>();
    if (shape_.hasValid || step_.lower || step_.upper) PrepareMask(keys, rows, scratch);
    if (pairs_.Any()) pairs_.Prepare(step_, keyColumns_, queryColumns_, keys);
    if (dropout_.Drops()) dropout_.Prepare(step_, keys, rows, KeyColumn(step_.keys - 1), scratch);
    if (hasPosition_) {
      // Addresses of M - 1 + query column, less those of key columns.
      Adds(rows, rows, shape_.positionEntries / 2, step_.rows);
      PipeBarrier<PIPE_V>();
      Muls(rows, rows, 4, step_.rows);
      Muls(keys, keys, 4, RoundUp(step_.keys, kColumnUnit));
      PipeBarrier<PIPE_V>();
      Spread(rowPlaces_.Get<int32_t>(), rows);
    }
    PipeBarrier<PIPE_V>();
  }

  // Rows from `row` on; no columns where they see nothing.
  __aicore__ inline Slab Cut(int32_t row) const {
    const int32_t whole = RoundUp(step_.keys, kColumnUnit);
    const bool edge = step_.lower || step_.upper;
    // At an edge slabs are lower, so that fewer columns are computed for nothing.
    const int32_t wanted = edge ? Larger(shape_.slab / 2 / whole, 16) : shape_.slab / whole;
    const int32_t rows = Larger(RoundDown(Smaller(wanted, shape_.slab / whole), 8), 8);
    Slab slab{row, Smaller(Smaller(rows, kRowBlock), step_.rows - row), 0, step_.keys, whole};
    if (!edge) return slab;
    int32_t high = step_.keys;
    if (step_.upper) {
      const int64_t limit = static_cast<int64_t>(queryColumns_.GetValue(row)) - shape_.maxDistance;
      slab.low = RoundDown(CountBelow(keyColumns_, step_.keys, limit), kColumnUnit);
    }
    if (step_.lower) {
      const int64_t last = static_cast<int64_t>(queryColumns_.GetValue(row + slab.rows - 1));
      high = CountBelow(keyColumns_, step_.keys, last - shape_.minDistance + 1);
    }
    high = Smaller(RoundUp(high, kColumnUnit), step_.keys);
    slab.columns = Larger(high - slab.low, 0);
    slab.width = RoundUp(slab.columns, kColumnUnit);
    return slab;
  }

  // scores[r, c] = value where the pair is hidden.
  __aicore__ inline void Hide(const LocalTensor<float>& scores, const Slab& slab, float value,
                              const LocalTensor<float>& scratch) {
    if (masked_) HideKeys(scores, slab, value);
    if (pairs_.HasMask()) pairs_.Hide(scores, slab, value, scratch);
  }

  // Dropout: Draw says which pairs of a slab stay, and Drop puts a 0 where others are.
  __aicore__ inline bool Drops() const { return dropout_.Drops(); }
  __aicore__ inline void Draw(const Slab& slab, const LocalTensor<float>& scratch) { dropout_.Draw(slab, scratch); }
  __aicore__ inline void Drop(const LocalTensor<float>& x, const Slab& slab) { dropout_.Apply(x, slab); }

  // Adds biases to scores, or takes them away where scores come with the other sign. The entries of time_bias are kept
  // where `entries` has room for them: as floats, times four.
  __aicore__ inline void Bias(const LocalTensor<float>& scores, const Slab& slab, bool negative,
                              const LocalTensor<float>& scratch, const LocalTensor<float>* kept = nullptr) {
    if (pairs_.HasBias()) pairs_.AddBias(scores, slab, negative, scratch);
    if (!hasPosition_ && !hasTime_) return;
    const int32_t part = shape_.slab / 4;
    const int32_t rows = part / slab.width;
    for (int32_t row = 0; row < slab.rows; row += rows) {
      Slab piece = slab;
      piece.row += row;
      piece.rows = Smaller(rows, slab.rows - row);
      auto to = scores[row * slab.width];
      if (hasPosition_) {
        Positions(piece, scratch, scratch[part]);
        Apply(to, scratch[part], piece.Count(), negative);
      }
      if (hasTime_) {
        auto entries = Entries(piece, scratch);
        auto found = scratch[3 * part];
        Gather(found, times_, entries, 0U, static_cast<uint32_t>(piece.Count()));
        if (kept != nullptr) {
          auto numbers = entries.template ReinterpretCast<int32_t>();
          Cast((*kept)[row * slab.width], numbers, RoundMode::CAST_NONE, piece.Count());
        }
        PipeBarrier<PIPE_V>();
        Apply(to, found, piece.Count(), negative);
      }
    }
  }

  // Bytes of the entries of time_bias, for a part of a slab: in the third quarter of the scratch.
  __aicore__ inline LocalTensor<uint32_t> Entries(const Slab& piece, const LocalTensor<float>& scratch) {
    const int32_t part = shape_.slab / 4;
    auto gaps = scratch.template ReinterpretCast<int32_t>();
    auto entries = scratch[2 * part].template ReinterpretCast<int32_t>();
    RowsMinusKeys(gaps, rowTimes_.Get<int32_t>()[piece.row * 8], keyTimes_.Get<int32_t>()[piece.low], piece.rows,
                  piece.width);
    PipeBarrier<PIPE_V>();
    buckets_.Find(gaps, entries, scratch[part].template ReinterpretCast<int32_t>(), piece.Count());
    return entries.template ReinterpretCast<uint32_t>();
  }

  // Ends a tile.
  __aicore__ inline void End() {
    if (begun_) info_.FreeTensor(current_);
    begun_ = false;
  }

  // Ends the last one.
  __aicore__ inline void Finish() {
    pipe_->ReleaseEventID<HardEvent::MTE2_S>(loaded_);
    if (tableHead_ >= 0) tables_.FreeTensor(table_);
  }

  // Columns of the padded batch, of a query and of a key of the tile that has begun.
  __aicore__ inline int64_t QueryColumn(int32_t row) const { return static_cast<int64_t>(queryColumns_.GetValue(row)); }
  __aicore__ inline int64_t KeyColumn(int32_t key) const { return static_cast<int64_t>(keyColumns_.GetValue(key)); }
  __aicore__ inline int32_t KeysBelow(int64_t limit) const { return CountBelow(keyColumns_, step_.keys, limit); }

 private:
  // Whether columns or times of each tile are to be known, be it at an edge or not.
  __aicore__ inline bool Informed() const {
    return shape_.hasValid || pairs_.Any() || hasPosition_ || hasTime_ || dropout_.Drops();
  }
  __aicore__ inline bool Needs(const Step& step) const {
    return step.Busy() && (step.lower || step.upper || Informed());
  }

  // By distance, and keys that are not valid.
  __aicore__ inline void HideKeys(const LocalTensor<float>& scores, const Slab& slab, float value) {
    auto bits = bits_.Get<uint8_t>();
    auto other = bits[shape_.slab / 8 + kRowBlock * 8];
    auto keys = keyFloats_.Get<float>();
    auto most = rowLimits_.Get<float>()[slab.row * 8];
    auto least = rowLimits_.Get<float>()[(kRowBlock + slab.row) * 8];
    auto hidden = hidden_.Get<float>();
    const int32_t bytes = RoundUp(slab.rows, 4) * 8;  // of bits for 64 columns
    Duplicate(hidden, value, 8);
    // A repeat of Compare looks at 64 keys, whatever the mask; those beyond the slab are not selected by.
    for (int32_t c = 0; c < slab.width; c += kLanes) {
      const BinaryRepeatParams broadcast{1, 0, 1, 8, 1, 0};
      auto own = bits[c / kLanes * bytes];
      Compare(own, most, keys[slab.low + c], CMPMODE::GE, kLanes, slab.rows, broadcast);
      if (step_.upper) {
        Compare(other, least, keys[slab.low + c], CMPMODE::LE, kLanes, slab.rows, broadcast);
        PipeBarrier<PIPE_V>();
        And(own.template ReinterpretCast<uint16_t>(), own.template ReinterpretCast<uint16_t>(),
            other.template ReinterpretCast<uint16_t>(), slab.rows * 4);
      }
    }
    PipeBarrier<PIPE_V>();
    for (int32_t c = 0; c < slab.width; c += kLanes) {
      const uint8_t pitch = static_cast<uint8_t>(slab.width / 8);
      Select(scores[c], bits[c / kLanes * bytes], scores[c], hidden, SELMODE::VSEL_TENSOR_TENSOR_MODE,
             static_cast<uint64_t>(Smaller(kLanes, slab.width - c)), slab.rows,
             BinaryRepeatParams{1, 1, 0, pitch, pitch, 0});
    }
    PipeBarrier<PIPE_V>();
  }

  // Columns behind the last key, up to a multiple of 16: they are computed and not used, but must have addresses.
  __aicore__ inline void PadKeys(const LocalTensor<int32_t>& keys, int32_t value) {
    if (step_.keys % kColumnUnit == 0) return;
    Duplicate(keys[RoundDown(step_.keys, kColumnUnit)], value, kColumnUnit);
    PipeBarrier<PIPE_V>();
  }

  template <typename T>
  __aicore__ inline void ToInt32(const LocalTensor<int32_t>& to, const LocalTensor<T>& from, int32_t count) {
    if constexpr (sizeof(T) == 8) {
      Cast(to, from, RoundMode::CAST_NONE, count);
    } else {
      Adds(to, from, 0, count);
    }
  }

  // One block for each row.
  template <typename T>
  __aicore__ inline void Spread(const LocalTensor<T>& blocks, const LocalTensor<T>& rows) {
    Brcb(blocks, rows, (step_.rows + 7) / 8, BrcbRepeatParams{1, 8});
  }

  __aicore__ inline void PrepareMask(const LocalTensor<int32_t>& keys, const LocalTensor<int32_t>& rows,
                                     const LocalTensor<float>& scratch) {
    auto keyFloats = keyFloats_.Get<float>();
    auto rowFloats = rowFloats_.Get<float>();
    Cast(keyFloats, keys, RoundMode::CAST_NONE, step_.keys);
    Cast(rowFloats, rows, RoundMode::CAST_NONE, step_.rows);
    PipeBarrier<PIPE_V>();
    if (shape_.hasValid) HideInvalid(keyFloats, scratch);
    if (!masked_) return;
    Adds(scratch, rowFloats, -static_cast<float>(shape_.minDistance), step_.rows);
    Adds(scratch[kKeyBlock], rowFloats, -static_cast<float>(shape_.maxDistance), step_.rows);
    PipeBarrier<PIPE_V>();
    Spread(rowLimits_.Get<float>(), scratch);
    Spread(rowLimits_.Get<float>()[kRowBlock * 8], scratch[kKeyBlock]);
    PipeBarrier<PIPE_V>();
  }

  // Keys that are not valid go beyond all columns; without any the tile needs no mask for their sake.
  __aicore__ inline void HideInvalid(const LocalTensor<float>& keyFloats, const LocalTensor<float>& scratch) {
    auto halves = scratch[kKeyBlock].template ReinterpretCast<half>();
    Cast(halves, current_[keyValidAt_], RoundMode::CAST_NONE, step_.keys);
    PipeBarrier<PIPE_V>();
    Cast(scratch, halves, RoundMode::CAST_NONE, step_.keys);
    PipeBarrier<PIPE_V>();
    ReduceMin(hidden_.Get<float>(), scratch, scratch[kKeyBlock], step_.keys, false);
    Muls(scratch, scratch, -kHiddenColumn, step_.keys);
    PipeBarrier<PIPE_V>();
    Adds(scratch, scratch, kHiddenColumn, step_.keys);
    PipeBarrier<PIPE_V>();
    Add(keyFloats, keyFloats, scratch, step_.keys);
    PipeBarrier<PIPE_V>();
    const auto reduced = pipe_->FetchEventID(HardEvent::V_S);
    SetFlag<HardEvent::V_S>(reduced);
    WaitFlag<HardEvent::V_S>(reduced);
    if (hidden_.Get<float>().GetValue(0) == 0.0f) masked_ = true;
    const auto read = pipe_->FetchEventID(HardEvent::S_V);
    SetFlag<HardEvent::S_V>(read);
    WaitFlag<HardEvent::S_V>(read);
  }

  // Tables of this head, unless they are there already.
  __aicore__ inline void LoadTables() {
    const bool shared = shape_.positionHeads <= 1 && shape_.timeHeads <= 1;
    const int32_t head = shared ? 0 : step_.head;
    if (head == tableHead_) return;
    if (tableHead_ >= 0) tables_.FreeTensor(table_);
    tableHead_ = head;
    auto table = tables_.AllocTensor<float>();
    if (hasPosition_) {
      const int64_t row = shape_.positionHeads > 1 ? head : 0;
      CopyIn(table, inputs_.positionBias[row * shape_.positionEntries], shape_.positionEntries);
    }
    if (hasTime_) {
      const int64_t row = shape_.timeHeads > 1 ? head : 0;
      CopyIn(table[RoundUp(shape_.positionEntries, 8)], inputs_.timeBias[row * (shape_.timeBounds + 1)],
             shape_.timeBounds + 1);
    }
    tables_.EnQue(table);
    table_ = tables_.DeQue<float>();
    times_ = table_[RoundUp(shape_.positionEntries, 8)];
  }

  __aicore__ inline void Positions(const Slab& piece, const LocalTensor<float>& places,
                                   const LocalTensor<float>& found) {
    auto addresses = places.template ReinterpretCast<int32_t>();
    RowsMinusKeys(addresses, rowPlaces_.Get<int32_t>()[piece.row * 8], columns_.Get<int32_t>()[piece.low], piece.rows,
                  piece.width);
    PipeBarrier<PIPE_V>();
    Gather(found, table_, addresses.template ReinterpretCast<uint32_t>(), 0U, static_cast<uint32_t>(piece.Count()));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Apply(const LocalTensor<float>& scores, const LocalTensor<float>& bias, int32_t count,
                               bool negative) {
    if (negative) {
      Sub(scores, scores, bias, count);
    } else {
      Add(scores, scores, bias, count);
    }
    PipeBarrier<PIPE_V>();
  }

  TPipe* pipe_;
  AttentionShape shape_;
  TileInputs<Index> inputs_;
  bool hasPosition_ = false, hasTime_ = false, masks_ = false, begun_ = false, masked_ = false;
  int32_t keyTimesAt_ = 0, keyValidAt_ = 0, tableHead_ = -1;
  TEventID loaded_ = 0;
  TQue<TPosition::VECIN, 1> info_, tables_;
  TBuf<TPosition::VECCALC> columns_, keyFloats_, rowFloats_, rowLimits_, bits_, hidden_, rowPlaces_, keyTimes_,
      rowTimes_;
  LocalTensor<uint8_t> current_;
  LocalTensor<Index> keyColumns_, queryColumns_;
  LocalTensor<float> table_, times_;
  TimeBuckets buckets_;
  PairTables<Index> pairs_;
  PairDropout dropout_;
  Step step_;
};

}  // namespace turbogr
