// Attention over packed sequences: scores by the cube core, weights by the vector cores, and their product by the cube.
//
// A unit of work is a block of queries of one sequence and head; it goes over the keys that any of them sees, a tile at
// a time. Tiles of all units of a core form one stream, and three of them are under way at once:
//
//     tile i       scores = query · keyᵀ                            cube, into the ring of scores
//     tile i - 1   weights = activation(scale · scores + biases)    vector, from that ring into the ring of weights
//     tile i - 2   result += weights · value                        cube, then vector
//
// The vector pipe is the bottleneck below a head_dim of about 128, so little is left to it:
//   silu     t = -(scale · s + bias), then t / (1 + exp(t)) = -silu: the sign and post_scale are left to the few
//            numbers of the result. Results of the tiles of a unit are added up by the cube, in fp32 in the workspace,
//            one after the other. exp(t) = inf gives 0, as it should.
//   softmax  online: with a higher maximum, what was summed so far is worth less. Products come tile by tile, and are
//            added up in UB, times exp(old - new maximum): 2/64 cycles for each of head_dim numbers, where the weights
//            take 7/64 for each of 256. To leave that out where the maximum stays, the scalar unit would have to wait
//            for the vector unit in each tile.
#pragma once

#include "attention_vector.h"
#include "jagged_attention_tiling_data.h"
#include "lib/matmul_intf.h"
#include "schedule.h"

namespace turbogr {

constexpr float kLeastTop = -1e30f;  // maximum of a row that has seen nothing: far above kNoScore

// Blocks of queries, and what they cost: about the elements of the tiles that are computed, in units of 256.
struct QueryBlocks {
  int32_t rows, minDistance, maxDistance;

  __aicore__ inline int32_t Blocks(const Place& place) const { return (place.queries + rows - 1) / rows; }

  // Columns are not looked at: the last query is taken to stand where the last key does, and no row to be missing.
  __aicore__ inline int64_t Cost(const Place& place) const {
    const int32_t begin = place.block * rows;
    const int32_t own = Smaller(rows, place.queries - begin);
    if (!place.real) return 1;
    const int64_t shift = int64_t{place.keys} - place.queries + begin;
    int64_t low = shift - maxDistance, high = shift + own - minDistance;
    low = low > 0 ? low : 0;
    high = high < place.keys ? high : place.keys;
    const int64_t seen = high > low ? high - low : 0;
    return 8 + (own * seen >> 8);
  }
};

using Address = GM_ADDR;

struct AttentionArguments {
  Address query, key, value, queryOffsets, keyOffsets, queryColumns, keyColumns, keyValid, pairMask, bias, positionBias,
      timeBias, timeBounds, queryTimes, keyTimes, dropoutSeed, result, logSum;
};

template <typename T, typename Index>
class JaggedAttentionKernel {
  using Rows = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T>;
  using Columns = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T, true>;
  using Floats = matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>;

 public:
  matmul::Matmul<Rows, Columns, Floats> scores;  // query · keyᵀ
  matmul::Matmul<Rows, Rows, Floats> values;     // weights · value

  __aicore__ inline void Init(TPipe* pipe, const JaggedAttentionTiling& tiling, const AttentionArguments& gm,
                              GM_ADDR workspace) {
    pipe_ = pipe;
    shape_ = tiling.shape;
    core_ = static_cast<int32_t>(GetBlockIdx());
    if (core_ >= shape_.cores) return;
    width_ = RoundUp(shape_.valueDepth, kColumnUnit);
    query_.SetGlobalBuffer((__gm__ T*)gm.query);
    key_.SetGlobalBuffer((__gm__ T*)gm.key);
    value_.SetGlobalBuffer((__gm__ T*)gm.value);
    result_.SetGlobalBuffer((__gm__ T*)gm.result);
    logSum_.SetGlobalBuffer((__gm__ float*)gm.logSum);
    inputs_.queryColumns.SetGlobalBuffer((__gm__ Index*)gm.queryColumns);
    inputs_.keyColumns.SetGlobalBuffer((__gm__ Index*)gm.keyColumns);
    inputs_.keyValid.SetGlobalBuffer(gm.keyValid);
    inputs_.pairMask.SetGlobalBuffer(gm.pairMask);
    inputs_.bias.SetGlobalBuffer((__gm__ float*)gm.bias);
    inputs_.positionBias.SetGlobalBuffer((__gm__ float*)gm.positionBias);
    inputs_.timeBias.SetGlobalBuffer((__gm__ float*)gm.timeBias);
    inputs_.timeBounds.SetGlobalBuffer((__gm__ int32_t*)gm.timeBounds);
    inputs_.queryTimes.SetGlobalBuffer((__gm__ int32_t*)gm.queryTimes);
    inputs_.keyTimes.SetGlobalBuffer((__gm__ int32_t*)gm.keyTimes);
    inputs_.dropoutSeed.SetGlobalBuffer((__gm__ int64_t*)gm.dropoutSeed);
    InitWorkspace(workspace + core_ * tiling.coreBytes);
    InitBuffers();
    GlobalTensor<Index> queryOffsets, keyOffsets;
    queryOffsets.SetGlobalBuffer((__gm__ Index*)gm.queryOffsets);
    keyOffsets.SetGlobalBuffer((__gm__ Index*)gm.keyOffsets);
    schedule_.Init(pipe, {shape_.rowBlock, shape_.minDistance, shape_.maxDistance}, queryOffsets, keyOffsets,
                   shape_.sequences, shape_.queryRows, shape_.keyRows, shape_.heads, shape_.cores, core_, kOffsetChunk);
    // Rows of a head lie apart by those of all heads. Said once: each call is a message to the cube core.
    const int32_t depth = shape_.depth;
    scores.SetOrgShape(shape_.rowBlock, kKeyBlock, shape_.heads * depth, shape_.groups * depth, kKeyBlock);
    values.SetOrgShape(shape_.rowBlock, shape_.groups * shape_.valueDepth, kKeyBlock, kKeyBlock, width_);
  }

  __aicore__ inline void Run() {
    if (core_ >= shape_.cores) return;
    Step next, now, past;
    next.exists = now.exists = past.exists = false;
    do {
      past = now;
      now = next;
      next.exists = NextStep(next);
      // The first slab is loaded before the message is posted: that waits until the weights of the last tile are out.
      if (now.Busy()) {
        scores.WaitIterateAll();
        tile_.Begin(now);
        Start(now);
      }
      if (next.Busy()) {
        tile_.Fetch(next);
        PostScores(next);
      }
      if (now.Busy()) Weigh(now);
      if (past.Busy()) values.WaitIterateAll();
      if (now.Busy()) PostValues(now);
      if (past.exists) Collect(past);
    } while (next.exists || now.exists);
    tile_.Finish();
  }

 private:
  __aicore__ inline void InitWorkspace(GM_ADDR own) {
    const int64_t tile = int64_t{shape_.rowBlock} * kKeyBlock;
    ringScores_.SetGlobalBuffer((__gm__ float*)own, 2 * tile);
    ringWeights_.SetGlobalBuffer((__gm__ T*)(own + 2 * tile * sizeof(float)), 2 * tile);
    ringResults_.SetGlobalBuffer((__gm__ float*)(own + 2 * tile * (sizeof(float) + sizeof(T))),
                                 2 * int64_t{shape_.rowBlock} * width_);
  }

  __aicore__ inline void InitBuffers() {
    pipe_->InitBuffer(in_, 2, shape_.slab * sizeof(float));
    pipe_->InitBuffer(out_, 2, shape_.slab * sizeof(T));
    pipe_->InitBuffer(scratch_, shape_.slab * sizeof(float));
    if (shape_.softmax) {
      pipe_->InitBuffer(sums_, shape_.rowBlock * width_ * sizeof(float));
      pipe_->InitBuffer(rows_, kRowVectors * kRowBlock * sizeof(float));
      pipe_->InitBuffer(blocks_, kRowBlock * 32);
    }
    tile_.Init(pipe_, shape_, inputs_, scratch_.Get<float>());
  }

  // --- the stream of tiles ----------------------------------------------------------------------------

  __aicore__ inline bool NextStep(Step& step) {
    if (keyAt_ >= keyEnd_ && !NextUnit()) return false;
    step.queryRow = queryRow_;
    step.rows = unitRows_;
    step.head = head_;
    step.sequence = place_.sequence;
    step.exists = true;
    step.first = keyAt_ == keyBegin_;
    step.keyRow = place_.keyFirst + keyAt_;
    step.keys = Smaller(kKeyBlock, keyEnd_ - keyAt_);
    step.unit = unit_ % 2;
    step.slot = stepNumber_ % 2;
    keyAt_ += kKeyBlock;
    step.last = keyAt_ >= keyEnd_;
    step.lower = step.upper = false;
    step.column = 0;
    if (step.keys > 0) {
      ++stepNumber_;
      FindEdges(step);
    } else {
      step.keys = 0;
    }
    return true;
  }

  __aicore__ inline bool NextUnit() {
    if (!schedule_.Next(place_, head_)) return false;
    ++unit_;
    queryRow_ = place_.queryFirst + int64_t{place_.block} * shape_.rowBlock;
    unitRows_ = Smaller(shape_.rowBlock, place_.queries - place_.block * shape_.rowBlock);
    keyBegin_ = 0;
    keyEnd_ = place_.real ? place_.keys : 0;
    if (keyEnd_ > 0 && Windowed()) {
      const auto columns = inputs_.keyColumns[place_.keyFirst];
      firstColumn_ = static_cast<int64_t>(inputs_.queryColumns.GetValue(queryRow_));
      lastColumn_ = static_cast<int64_t>(inputs_.queryColumns.GetValue(queryRow_ + unitRows_ - 1));
      keyBegin_ = CountBelow(columns, place_.keys, firstColumn_ - shape_.maxDistance);
      keyEnd_ = CountBelow(columns, place_.keys, lastColumn_ - shape_.minDistance + 1);
    }
    keyAt_ = keyBegin_;
    if (keyEnd_ < keyBegin_) keyEnd_ = keyBegin_;
    return true;
  }

  __aicore__ inline bool Windowed() const {
    return shape_.minDistance > -kFarColumn || shape_.maxDistance < kFarColumn;
  }

  __aicore__ inline void FindEdges(Step& step) {
    if (shape_.positionEntries > 0 || shape_.bias.columns > 0 || shape_.mask.columns > 0)
      step.column = static_cast<int32_t>(inputs_.keyColumns.GetValue(step.keyRow));
    if (!Windowed()) return;
    const int64_t first = static_cast<int64_t>(inputs_.keyColumns.GetValue(step.keyRow));
    const int64_t last = static_cast<int64_t>(inputs_.keyColumns.GetValue(step.keyRow + step.keys - 1));
    step.lower = firstColumn_ - last < shape_.minDistance;
    step.upper = lastColumn_ - first > shape_.maxDistance;
  }

  // --- the cube ---------------------------------------------------------------------------------------

  __aicore__ inline void PostScores(const Step& step) {
    const int64_t group = step.head / (shape_.heads / shape_.groups);
    scores.SetSingleShape(step.rows, step.keys, shape_.depth);
    scores.SetTensorA(query_[(step.queryRow * shape_.heads + step.head) * shape_.depth]);
    scores.SetTensorB(key_[(step.keyRow * shape_.groups + group) * shape_.depth], true);
    scores.template IterateAll<false>(ringScores_[TileAt(step)], 0, false, true);
  }

  __aicore__ inline void PostValues(const Step& step) {
    const int64_t group = step.head / (shape_.heads / shape_.groups);
    values.SetSingleShape(step.rows, shape_.valueDepth, step.keys);
    values.SetTensorA(ringWeights_[TileAt(step)]);
    values.SetTensorB(value_[(step.keyRow * shape_.groups + group) * shape_.valueDepth]);
    const uint8_t add = !shape_.softmax && !step.first;
    values.template IterateAll<false>(ringResults_[ResultAt(step)], add, false, true);
  }

  __aicore__ inline int64_t TileAt(const Step& step) const {
    return int64_t{step.slot} * shape_.rowBlock * kKeyBlock;
  }
  __aicore__ inline int64_t ResultAt(const Step& step) const {
    return int64_t{shape_.softmax ? step.slot : step.unit} * shape_.rowBlock * width_;
  }

  // --- weights ----------------------------------------------------------------------------------------

  __aicore__ inline void Start(const Step& step) {
    ahead_ = tile_.Cut(0);
    if (ahead_.columns > 0) Load(step, ahead_);
  }

  __aicore__ inline void Load(const Step& step, const Slab& slab) {
    LoadRows(in_, ringScores_[TileAt(step) + int64_t{slab.row} * kKeyBlock + slab.low], slab.rows, slab.columns,
             slab.width, kKeyBlock);
  }

  __aicore__ inline void Weigh(const Step& step) {
    tile_.Prepare(scratch_.Get<float>());
    if (shape_.softmax && step.first) {
      Duplicate(RowVector(kTops + step.unit), kLeastTop, kRowBlock);
      Duplicate(RowVector(kTotals + step.unit), 0.0f, kRowBlock);
      PipeBarrier<PIPE_V>();
    }
    while (ahead_.row < step.rows) {
      const Slab slab = ahead_;
      LocalTensor<float> own;
      if (slab.columns > 0) own = in_.DeQue<float>();
      ahead_.row = slab.row + slab.rows;
      if (ahead_.row < step.rows) {
        ahead_ = tile_.Cut(ahead_.row);
        if (ahead_.columns > 0) Load(step, ahead_);
      }
      if (slab.columns > 0) {
        if (shape_.softmax) {
          Softmax(step, slab, own);
        } else {
          Silu(step, slab, own);
        }
        in_.FreeTensor(own);
      } else if (shape_.softmax) {
        Duplicate(RowVector(kFactors + step.slot)[slab.row], 1.0f, slab.rows);
        PipeBarrier<PIPE_V>();
      }
      const auto weights = ringWeights_[TileAt(step)];
      ClearColumns(out_, weights, slab, 0, slab.low, shape_.slab);
      ClearColumns(out_, weights, slab, slab.low + slab.columns, step.keys, shape_.slab);
    }
    tile_.End();
  }

  __aicore__ inline void Silu(const Step& step, const Slab& slab, const LocalTensor<float>& x) {
    auto scratch = scratch_.Get<float>();
    const int32_t count = slab.Count();
    Muls(x, x, -shape_.scale, count);
    PipeBarrier<PIPE_V>();
    tile_.Bias(x, slab, true, scratch);
    tile_.Hide(x, slab, kNoSilu, scratch);
    Exp(scratch, x, count);
    PipeBarrier<PIPE_V>();
    Adds(scratch, scratch, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Div(x, x, scratch, count);
    PipeBarrier<PIPE_V>();
    Drop(slab, x);
    Emit(step, slab, x);
  }

  __aicore__ inline void Softmax(const Step& step, const Slab& slab, const LocalTensor<float>& x) {
    auto scratch = scratch_.Get<float>();
    auto top = RowVector(kTops + step.unit)[slab.row];
    auto total = RowVector(kTotals + step.unit)[slab.row];
    auto factor = RowVector(kFactors + step.slot)[slab.row];
    auto found = RowVector(kFound);
    auto blocks = blocks_.Get<float>();
    Muls(x, x, shape_.scale, slab.Count());
    PipeBarrier<PIPE_V>();
    tile_.Bias(x, slab, false, scratch);
    tile_.Hide(x, slab, kNoScore, scratch);
    RowReduction<true>::Run(found, x, slab.rows, slab.columns, slab.width, scratch, RowVector(kRest));
    Max(found, found, top, slab.rows);
    PipeBarrier<PIPE_V>();
    Sub(factor, top, found, slab.rows);
    Brcb(blocks, found, (slab.rows + 7) / 8, BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    Adds(top, found, 0.0f, slab.rows);
    Exp(factor, factor, slab.rows);
    MinusBlocks(x, blocks, slab.rows, slab.width);
    PipeBarrier<PIPE_V>();
    Exp(x, x, slab.Count());
    Mul(total, total, factor, slab.rows);
    PipeBarrier<PIPE_V>();
    RowReduction<false>::Run(found, x, slab.rows, slab.columns, slab.width, scratch, RowVector(kRest));
    Add(total, total, found, slab.rows);
    Drop(slab, x);
    Emit(step, slab, x);
  }

  // Sums of exponentials are over all pairs, weights over those that stay; what those gain is part of post_scale.
  __aicore__ inline void Drop(const Slab& slab, const LocalTensor<float>& x) {
    if (!tile_.Drops()) return;
    tile_.Draw(slab, scratch_.Get<float>());
    tile_.Drop(x, slab);
  }

  // Weights of a slab, in the dtype of the inputs.
  __aicore__ inline void Emit(const Step& step, const Slab& slab, const LocalTensor<float>& x) {
    auto to = out_.AllocTensor<T>();
    Narrow(to, x, slab.Count());
    out_.EnQue(to);
    StoreRows(out_, ringWeights_[TileAt(step) + int64_t{slab.row} * kKeyBlock + slab.low], slab.rows, slab.columns,
              slab.width, kKeyBlock);
  }

  // --- results ----------------------------------------------------------------------------------------

  // Takes the product of a tile, and writes the result of a unit behind its last one.
  __aicore__ inline void Collect(const Step& step) {
    if (!step.last && !shape_.softmax) return;
    if (shape_.softmax && step.last) FinishRows(step);
    const int32_t most = RoundDown(Smaller(shape_.slab / width_, kRowBlock), 8);
    for (int32_t row = 0; row < step.rows; row += most) {
      const int32_t rows = Smaller(most, step.rows - row);
      if (step.keys == 0) {
        StoreZeros(out_, ResultRows(step, row), rows, shape_.valueDepth, int64_t{shape_.heads} * shape_.valueDepth);
      } else if (shape_.softmax) {
        CollectSoftmax(step, row, rows);
      } else {
        auto x = LoadResult(step, row, rows);
        Muls(x, x, -shape_.postScale, rows * width_);
        PipeBarrier<PIPE_V>();
        WriteResult(step, row, rows, x);
        in_.FreeTensor(x);
      }
    }
  }

  __aicore__ inline LocalTensor<float> LoadResult(const Step& step, int32_t row, int32_t rows) {
    auto to = in_.AllocTensor<float>();
    DataCopy(to, ringResults_[ResultAt(step) + int64_t{row} * width_], rows * width_);
    in_.EnQue(to);
    return in_.DeQue<float>();
  }

  __aicore__ inline void CollectSoftmax(const Step& step, int32_t row, int32_t rows) {
    const int32_t count = rows * width_;
    auto x = LoadResult(step, row, rows);
    auto sums = sums_.Get<float>()[row * width_];
    if (!step.first) {
      TimesRows(sums, RowVector(kFactors + step.slot)[row], rows);
      Add(x, x, sums, count);
      PipeBarrier<PIPE_V>();
    }
    if (step.last) {
      TimesRows(x, RowVector(kShares)[row], rows);
      WriteResult(step, row, rows, x);
    } else {
      Adds(sums, x, 0.0f, count);
      PipeBarrier<PIPE_V>();
    }
    in_.FreeTensor(x);
  }

  __aicore__ inline void TimesRows(const LocalTensor<float>& x, const LocalTensor<float>& factors, int32_t rows) {
    auto blocks = blocks_.Get<float>();
    Brcb(blocks, factors, (rows + 7) / 8, BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
    TimesBlocks(x, blocks, rows, width_);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void WriteResult(const Step& step, int32_t row, int32_t rows, const LocalTensor<float>& x) {
    auto to = out_.AllocTensor<T>();
    Narrow(to, x, rows * width_);
    out_.EnQue(to);
    StoreRows(out_, ResultRows(step, row), rows, shape_.valueDepth, width_, int64_t{shape_.heads} * shape_.valueDepth);
  }

  __aicore__ inline GlobalTensor<T> ResultRows(const Step& step, int32_t row) {
    return result_[((step.queryRow + row) * shape_.heads + step.head) * shape_.valueDepth];
  }

  // post_scale / total of each row, and log_sum = maximum + ln(total): infinite, and no share, where nothing was seen.
  __aicore__ inline void FinishRows(const Step& step) {
    auto share = RowVector(kShares);
    auto sums = RowVector(kFound);
    auto seen = RowVector(kRest).template ReinterpretCast<uint8_t>();
    auto blocks = out_.AllocTensor<T>();
    auto logs = blocks.template ReinterpretCast<float>();
    if (step.keys == 0) {
      Duplicate(logs, kInfinity, step.rows * 8);
    } else {
      auto top = RowVector(kTops + step.unit);
      auto total = RowVector(kTotals + step.unit);
      // A row that has seen anything has a total of 1 or more: its maximum has a weight of 1.
      CompareScalar(seen, total, 0.5f, CMPMODE::GT, kRowBlock);
      Maxs(sums, total, 1.0f, kRowBlock);
      Duplicate(share, shape_.postScale, kRowBlock);
      PipeBarrier<PIPE_V>();
      Div(share, share, sums, kRowBlock);
      Ln(sums, sums, kRowBlock);
      PipeBarrier<PIPE_V>();
      Add(sums, sums, top, kRowBlock);
      PipeBarrier<PIPE_V>();
      Select(sums, seen, sums, kInfinity, SELMODE::VSEL_TENSOR_SCALAR_MODE, kRowBlock);
      PipeBarrier<PIPE_V>();
      Brcb(logs, sums, (step.rows + 7) / 8, BrcbRepeatParams{1, 8});
    }
    out_.EnQue(blocks);
    blocks = out_.DeQue<T>();
    DataCopyPad(logSum_[step.queryRow * shape_.heads + step.head], blocks.template ReinterpretCast<float>(),
                DataCopyExtParams{static_cast<uint16_t>(step.rows), sizeof(float), 0,
                                  static_cast<uint32_t>((shape_.heads - 1) * sizeof(float)), 0});
    out_.FreeTensor(blocks);
  }

  // One number for each row of a block; some of them twice, for two units or two tiles that are under way.
  static constexpr int32_t kTops = 0, kTotals = 2, kFactors = 4, kShares = 6, kFound = 7, kRest = 8, kRowVectors = 9;
  __aicore__ inline LocalTensor<float> RowVector(int32_t index) {
    return rows_.GetWithOffset<float>(kRowBlock, index * kRowBlock * sizeof(float));
  }

  TPipe* pipe_;
  AttentionShape shape_;
  TileInputs<Index> inputs_;
  GlobalTensor<T> query_, key_, value_, result_, ringWeights_;
  GlobalTensor<float> logSum_, ringScores_, ringResults_;
  Input in_;
  Output out_;
  TBuf<TPosition::VECCALC> scratch_, sums_, rows_, blocks_;
  AttentionTile<Index> tile_;
  Schedule<Index, QueryBlocks> schedule_;
  Slab ahead_;
  Place place_;
  int64_t queryRow_ = 0, firstColumn_ = 0, lastColumn_ = 0;
  int32_t core_ = 0, width_ = 0, unitRows_ = 0, head_ = 0, unit_ = 0, stepNumber_ = 0;
  int32_t keyBegin_ = 0, keyAt_ = 0, keyEnd_ = 0;
};

}  // namespace turbogr
