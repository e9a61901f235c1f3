// Gradients of biases, which many tiles add to.
//
//     bias, position   a row of gradients of scores is added to its table by a copy with atomic addition. The table of
//                      positions is turned round, so that keys of ascending columns lie side by side, as in `bias`.
//     time             buckets that occur in a slab are summed one by one, and added when the head changes
//
// Tables of positions and times are summed in lanes first: one for each core, or, in a fixed order, one for each
// sequence, which one core alone has. Behind the last tile lanes are added up, in order.
#pragma once

#include "attention_vector.h"
#include "jagged_attention_backward_tiling_data.h"

namespace turbogr {

// All in global memory; gradients of tables, and their partial sums.
struct TableArguments {
  GlobalTensor<float> biasGrad, positionGrad, timeGrad, sumPositions, sumTimes;
};

template <typename Index>
class TableGradients {
 public:
  // `scratch` and `other` hold a slab each; they are used between calls by others.
  __aicore__ inline void Init(TPipe* pipe, const JaggedAttentionBackwardTiling& tiling, int32_t core,
                              AttentionTile<Index>* tile, const TableArguments& gm, const LocalTensor<float>& scratch,
                              const LocalTensor<float>& other) {
    pipe_ = pipe;
    tiling_ = tiling;
    shape_ = tiling.shape;
    core_ = core;
    tile_ = tile;
    biasGrad_ = gm.biasGrad;
    positionGrad_ = gm.positionGrad;
    timeGrad_ = gm.timeGrad;
    sumPositions_ = gm.sumPositions;
    sumTimes_ = gm.sumTimes;
    scratch_ = scratch;
    other_ = other;
    // Gradients of scores come without it.
    factor_ = shape_.softmax ? 1.0f : shape_.postScale;
    if (Wants(kWantBias | kWantPosition)) {
      pipe->InitBuffer(rowQueue_, 1, shape_.slab * sizeof(float));
      pipe->InitBuffer(dense_, 2 * kKeyBlock * sizeof(float));
    }
    if (Wants(kWantTime)) {
      pipe->InitBuffer(entries_, shape_.slab * sizeof(float));
      pipe->InitBuffer(bits_, shape_.slab / 8);
      pipe->InitBuffer(buckets_, tiling_.timePitch * 32);
      pipe->InitBuffer(timeQueue_, 1, tiling_.timePitch * sizeof(float));
      pipe->InitBuffer(sum_, 32);
      Duplicate(buckets_.Get<float>(), 0.0f, tiling_.timePitch * 8);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline bool Wants(int32_t what) const { return (tiling_.wanted & what) != 0; }

  // Where entries of time_bias are kept for AddTimes, as floats times four.
  __aicore__ inline LocalTensor<float> Entries() { return entries_.Get<float>(); }

  __aicore__ inline void AddRows(const Step& step, const Slab& slab, const LocalTensor<float>& grads) {
    const int32_t last = slab.low + slab.columns - 1;
    const int64_t span = tile_->KeyColumn(last) - tile_->KeyColumn(slab.low) + 1;
    if (span > slab.columns) {
      AddWithHoles(step, slab, grads, span);
      return;
    }
    auto to = rowQueue_.AllocTensor<float>();
    Muls(to, grads, factor_, slab.Count());
    rowQueue_.EnQue(to);
    Emit(step, slab.row, slab.rows, slab.columns, slab.width, tile_->KeyColumn(slab.low));
  }

  // Sums of the buckets that occur in a slab, into one block of 32 bytes each.
  __aicore__ inline void AddTimes(const Slab& slab, const LocalTensor<float>& grads) {
    const int32_t count = slab.Count();
    auto entries = entries_.Get<float>();
    auto bits = bits_.Get<uint8_t>();
    auto chosen = scratch_;
    auto other = other_;
    auto sum = sum_.Get<float>();
    auto buckets = buckets_.Get<float>();
    if (slab.columns < slab.width) {
      // Columns that are none belong to no bucket.
      const int32_t from = slab.width - kColumnUnit;
      const uint64_t none = 0xffff & ~((uint64_t{1} << (slab.columns - from)) - 1);
      uint64_t mask[2] = {none, 0};
      Duplicate(entries[from], -4.0f, mask, static_cast<uint8_t>(slab.rows), 1, static_cast<uint8_t>(slab.width / 8));
      PipeBarrier<PIPE_V>();
    }
    ReduceMin(sum, entries, other, count, false);
    PipeBarrier<PIPE_V>();
    ReduceMax(chosen, entries, other, count, false);
    const auto reduced = pipe_->FetchEventID(HardEvent::V_S);
    SetFlag<HardEvent::V_S>(reduced);
    WaitFlag<HardEvent::V_S>(reduced);
    const int32_t lowest = Larger(static_cast<int32_t>(sum.GetValue(0)), 0);
    const int32_t highest = static_cast<int32_t>(chosen.GetValue(0));
    const auto read = pipe_->FetchEventID(HardEvent::S_V);
    SetFlag<HardEvent::S_V>(read);
    WaitFlag<HardEvent::S_V>(read);
    PipeBarrier<PIPE_V>();
    for (int32_t entry = lowest; entry <= highest; entry += 4) {
      CompareScalar(bits, entries, static_cast<float>(entry), CMPMODE::EQ, RoundUp(count, kLanes));
      PipeBarrier<PIPE_V>();
      Select(chosen, bits, grads, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
      PipeBarrier<PIPE_V>();
      ReduceSum(sum, chosen, other, count);
      PipeBarrier<PIPE_V>();
      Add(buckets[entry * 2], buckets[entry * 2], sum, 1);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void FlushTimes(const Step& step) {
    const int32_t entries = shape_.timeBounds + 1;
    auto buckets = buckets_.Get<float>();
    auto to = timeQueue_.AllocTensor<float>();
    for (int32_t at = 0; at < entries; at += 248) {
      WholeReduceSum<float>(to[at], buckets[at * 8], 1, Smaller(248, entries - at), 1, 1, 1);
    }
    PipeBarrier<PIPE_V>();
    Duplicate(buckets, 0.0f, tiling_.timePitch * 8);
    PipeBarrier<PIPE_V>();
    timeQueue_.EnQue(to);
    to = timeQueue_.DeQue<float>();
    SetAtomicAdd<float>();
    if (tiling_.deterministic) PipeBarrier<PIPE_MTE3>();
    DataCopyPad(sumTimes_[Lane(step) * tiling_.timePitch], to,
                DataCopyExtParams{1, static_cast<uint32_t>(entries * sizeof(float)), 0, 0, 0});
    SetAtomicNone();
    timeQueue_.FreeTensor(to);
  }

  // Behind the last tile of all cores.
  __aicore__ inline void Conclude(Input& in) {
    if (Wants(kWantPosition)) {
      Sum(in, rowQueue_, sumPositions_, positionGrad_, shape_.positionHeads, shape_.positionEntries,
          tiling_.positionPitch, true);
    }
    if (Wants(kWantTime)) {
      Sum(in, timeQueue_, sumTimes_, timeGrad_, shape_.timeHeads, shape_.timeBounds + 1, tiling_.timePitch, false);
    }
  }

 private:
  // This core's or this sequence's partial sums, of one head.
  __aicore__ inline int64_t Lane(const Step& step) const {
    return int64_t{tiling_.deterministic ? step.sequence : core_} * shape_.heads + step.head;
  }

  // Rows of the last tensor in the queue, whose first numbers belong to a key column, to the tables they belong to.
  __aicore__ inline void Emit(const Step& step, int32_t row, int32_t rows, int32_t columns, int32_t width,
                              int64_t column) {
    auto from = rowQueue_.DeQue<float>();
    SetAtomicAdd<float>();
    if (Wants(kWantPosition)) {
      const int64_t zero = Lane(step) * tiling_.positionPitch + shape_.positionEntries / 2;
      EmitTo(sumPositions_, zero + column, -1, from, row, rows, columns, width);
    }
    if (Wants(kWantBias)) {
      const int64_t origin = step.sequence * tiling_.biasSequence + step.head * tiling_.biasHead;
      EmitTo(biasGrad_, origin + column, shape_.bias.query, from, row, rows, columns, width);
    }
    SetAtomicNone();
    rowQueue_.FreeTensor(from);
  }

  // `origin` is the place of query column 0, `stride` what a query column moves it by.
  __aicore__ inline void EmitTo(const GlobalTensor<float>& to, int64_t origin, int64_t stride,
                                const LocalTensor<float>& from, int32_t row, int32_t rows, int32_t columns,
                                int32_t width) {
    for (int32_t r = 0; r < rows; ++r) {
      DataCopyPad(to[origin + stride * tile_->QueryColumn(row + r)], from[r * width],
                  DataCopyExtParams{1, static_cast<uint32_t>(columns * sizeof(float)), 0, 0, 0});
      // Two rows may add to the same numbers: in order, where the order matters.
      if (tiling_.deterministic) PipeBarrier<PIPE_MTE3>();
    }
  }

  // Rows are spread over all columns first, a window of them at a time.
  __aicore__ inline void AddWithHoles(const Step& step, const Slab& slab, const LocalTensor<float>& grads,
                                      int64_t span) {
    auto places = dense_.Get<int32_t>();
    auto present = dense_.Get<float>()[kKeyBlock];
    auto spread = other_;
    const int64_t begin = tile_->KeyColumn(slab.low), end = begin + span;
    for (int64_t column = begin; column < end; column += kKeyBlock) {
      const int32_t first = tile_->KeysBelow(column);
      const int32_t past = Smaller(tile_->KeysBelow(column + kKeyBlock), slab.low + slab.columns);
      if (first >= past) continue;
      FindPlaces(slab, column, first, past);
      const int32_t columns = end - column < kKeyBlock ? static_cast<int32_t>(end - column) : kKeyBlock;
      const int32_t most = shape_.slab / kKeyBlock;
      for (int32_t row = 0; row < slab.rows; row += most) {
        const int32_t rows = Smaller(most, slab.rows - row);
        for (int32_t r = 0; r < rows; ++r) {
          Gather(spread[r * kKeyBlock], grads[(row + r) * slab.width], places.ReinterpretCast<uint32_t>(), 0U,
                 static_cast<uint32_t>(kKeyBlock));
        }
        PipeBarrier<PIPE_V>();
        Muls(spread, spread, factor_, rows * kKeyBlock);
        PipeBarrier<PIPE_V>();
        auto to = rowQueue_.AllocTensor<float>();
        for (int32_t c = 0; c < kKeyBlock; c += kLanes) {
          Mul(to[c], spread[c], present[c], kLanes, rows,
              BinaryRepeatParams{1, 1, 1, kKeyBlock / 8, kKeyBlock / 8, 0});
        }
        PipeBarrier<PIPE_V>();
        rowQueue_.EnQue(to);
        Emit(step, slab.row + row, rows, columns, kKeyBlock, column);
      }
    }
  }

  // For each column of the window the byte of its key in a row, and whether there is one.
  __aicore__ inline void FindPlaces(const Slab& slab, int64_t column, int32_t first, int32_t past) {
    auto places = dense_.Get<int32_t>();
    auto present = dense_.Get<float>()[kKeyBlock];
    Duplicate(places, 0, kKeyBlock);
    Duplicate(present, 0.0f, kKeyBlock);
    const auto cleared = pipe_->FetchEventID(HardEvent::V_S);
    SetFlag<HardEvent::V_S>(cleared);
    WaitFlag<HardEvent::V_S>(cleared);
    for (int32_t key = first; key < past; ++key) {
      const int32_t at = static_cast<int32_t>(tile_->KeyColumn(key) - column);
      places.SetValue(at, 4 * (key - slab.low));
      present.SetValue(at, 1.0f);
    }
    const auto written = pipe_->FetchEventID(HardEvent::S_V);
    SetFlag<HardEvent::S_V>(written);
    WaitFlag<HardEvent::S_V>(written);
  }

  // Partial sums of all lanes, in order; and of all heads where they share a table. `turned`: last entry first.
  __aicore__ inline void Sum(Input& in, Output& out, const GlobalTensor<float>& partial, const GlobalTensor<float>& to,
                             int32_t heads, int32_t entries, int32_t pitch, bool turned) {
    const int32_t chunk = kTableChunk;
    const int32_t chunks = (entries + chunk - 1) / chunk;
    for (int32_t item = core_; item < heads * chunks; item += shape_.cores) {
      const int32_t head = item / chunks, at = item % chunks * chunk;
      const int32_t own = Smaller(chunk, entries - at);
      auto sum = scratch_;
      Duplicate(sum, 0.0f, own);
      PipeBarrier<PIPE_V>();
      for (int32_t lane = 0; lane < tiling_.lanes * shape_.heads; ++lane) {
        if (heads > 1 && lane % shape_.heads != head) continue;
        auto x = in.AllocTensor<float>();
        CopyIn(x, partial[int64_t{lane} * pitch + (turned ? entries - at - own : at)], own);
        in.EnQue(x);
        x = in.DeQue<float>();
        Add(sum, sum, x, own);
        PipeBarrier<PIPE_V>();
        in.FreeTensor(x);
      }
      Write(out, to[int64_t{head} * entries + at], sum, own, turned);
    }
  }

  __aicore__ inline void Write(Output& out, const GlobalTensor<float>& to, const LocalTensor<float>& sum, int32_t count,
                               bool turned) {
    auto places = other_.ReinterpretCast<int32_t>();
    auto floats = out.AllocTensor<float>();
    if (turned) {
      CreateVecIndex(places, 0, static_cast<uint32_t>(count));
      PipeBarrier<PIPE_V>();
      Muls(places, places, -4, count);
      PipeBarrier<PIPE_V>();
      Adds(places, places, 4 * (count - 1), count);
      PipeBarrier<PIPE_V>();
      Gather(floats, sum, places.ReinterpretCast<uint32_t>(), 0U, static_cast<uint32_t>(count));
    } else {
      Muls(floats, sum, factor_, count);
    }
    PipeBarrier<PIPE_V>();
    out.EnQue(floats);
    floats = out.DeQue<float>();
    DataCopyPad(to, floats, DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(float)), 0, 0, 0});
    out.FreeTensor(floats);
  }

  static constexpr int32_t kTableChunk = 512;

  TPipe* pipe_;
  JaggedAttentionBackwardTiling tiling_;
  AttentionShape shape_;
  AttentionTile<Index>* tile_;
  GlobalTensor<float> biasGrad_, positionGrad_, timeGrad_, sumPositions_, sumTimes_;
  LocalTensor<float> scratch_, other_;
  Output rowQueue_, timeQueue_;
  TBuf<TPosition::VECCALC> dense_, entries_, bits_, buckets_, sum_;
  float factor_ = 1.0f;
  int32_t core_ = 0;
};

}  // namespace turbogr
