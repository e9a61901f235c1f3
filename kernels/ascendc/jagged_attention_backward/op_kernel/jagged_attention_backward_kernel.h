// Gradients of attention over packed sequences. Scores are computed anew, tile by tile.
//
// A unit of work is a block of keys of one sequence and key head; it goes over the heads that share it and over the
// blocks of queries that see any of the keys. Tiles of all units of a core form one stream, three of them under way:
//
//     tile i       scores = query · keyᵀ, slopes = grad · valueᵀ                 cube
//     tile i - 1   weights and gradients of scores, from both                    vector
//     tile i - 2   value_grad += weightsᵀ · grad, key_grad += scores_gradᵀ · query, query_grad += scores_grad · key
//
// The first two of the last row are added up by the cube in fp32, in the workspace of the core. Gradients of queries
// come from the blocks of many units: they are added atomically in fp32, in a workspace for all cores, and narrowed in
// the end. In deterministic mode a unit is all blocks of a sequence and key head, in order: then one core alone adds to
// a number, so that sums do not depend on who was first, nor on the number of cores.
//
// Constant factors wait for the last pass over the few numbers of the results. With t = -score, g = 1 / (1 + exp(t)):
//     silu     weight = post_scale · -t g,    scores_grad = slope · post_scale · g (1 - t + t g)
//     softmax  weight = post_scale · p,       scores_grad = p · (slope · post_scale - d),    p = exp(score - log_sum)
// where d = <grad, result> of the row: computed before the tiles, and kept with log_sum, one head behind the other.
// Dropout puts a 0 in the place of slopes, before d is taken from them, and of weights; post_scale has what others gain.
#pragma once

#include "jagged_attention_backward_tables.h"
#include "lib/matmul_intf.h"
#include "schedule.h"

namespace turbogr {

// Blocks of keys, and what they cost: about the elements of the tiles that are computed, in units of 256.
struct KeyBlocks {
  int32_t minDistance, maxDistance;
  bool whole;  // one block for all keys of a sequence

  __aicore__ inline int32_t Blocks(const Place& place) const {
    return whole ? Smaller(place.keys, 1) : (place.keys + kKeyBlock - 1) / kKeyBlock;
  }

  // Columns are not looked at: the last query is taken to stand where the last key does, and no row to be missing.
  __aicore__ inline int64_t Cost(const Place& place) const {
    if (!place.real) return 1;
    if (!whole) return 8 + BlockCost(place, place.block);
    int64_t cost = 8;
    for (int32_t block = 0; block * kKeyBlock < place.keys; ++block) cost += BlockCost(place, block);
    return cost;
  }

 private:
  __aicore__ inline int64_t BlockCost(const Place& place, int32_t block) const {
    const int32_t begin = block * kKeyBlock;
    const int32_t own = Smaller(kKeyBlock, place.keys - begin);
    const int64_t shift = int64_t{place.queries} - place.keys + begin;
    int64_t low = shift + minDistance, high = shift + own + maxDistance;
    low = low > 0 ? low : 0;
    high = high < place.queries ? high : place.queries;
    return high > low ? own * (high - low) >> 8 : 0;
  }
};

using Address = GM_ADDR;

struct AttentionBackwardArguments {
  Address grad, result, logSum, query, key, value, queryOffsets, keyOffsets, queryColumns, keyColumns, keyValid,
      pairMask, bias, positionBias, timeBias, timeBounds, queryTimes, keyTimes, dropoutSeed, queryGrad, keyGrad,
      valueGrad, biasGrad, positionGrad, timeGrad;
};

template <typename T, typename Index>
class JaggedAttentionBackwardKernel {
  using Rows = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T>;
  using Columns = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T, true>;
  using Floats = matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>;

 public:
  matmul::Matmul<Rows, Columns, Floats> pairs;    // query · keyᵀ and grad · valueᵀ
  matmul::Matmul<Columns, Rows, Floats> columns;  // weightsᵀ · grad and scores_gradᵀ · query
  matmul::Matmul<Rows, Rows, Floats> rows;        // scores_grad · key

  __aicore__ inline void Init(TPipe* pipe, const JaggedAttentionBackwardTiling& tiling,
                              const AttentionBackwardArguments& gm, GM_ADDR workspace) {
    pipe_ = pipe;
    tiling_ = tiling;
    shape_ = tiling.shape;
    core_ = static_cast<int32_t>(GetBlockIdx());
    if (core_ >= shape_.cores) return;
    depth_ = RoundUp(shape_.depth, kColumnUnit);
    width_ = RoundUp(shape_.valueDepth, kColumnUnit);
    grad_.SetGlobalBuffer((__gm__ T*)gm.grad);
    result_.SetGlobalBuffer((__gm__ T*)gm.result);
    logSum_.SetGlobalBuffer((__gm__ float*)gm.logSum);
    query_.SetGlobalBuffer((__gm__ T*)gm.query);
    key_.SetGlobalBuffer((__gm__ T*)gm.key);
    value_.SetGlobalBuffer((__gm__ T*)gm.value);
    queryGrad_.SetGlobalBuffer((__gm__ T*)gm.queryGrad);
    keyGrad_.SetGlobalBuffer((__gm__ T*)gm.keyGrad);
    valueGrad_.SetGlobalBuffer((__gm__ T*)gm.valueGrad);
    tableArguments_.biasGrad.SetGlobalBuffer((__gm__ float*)gm.biasGrad);
    tableArguments_.positionGrad.SetGlobalBuffer((__gm__ float*)gm.positionGrad);
    tableArguments_.timeGrad.SetGlobalBuffer((__gm__ float*)gm.timeGrad);
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
    InitWorkspace(workspace);
    InitBuffers();
    GlobalTensor<Index> queryOffsets, keyOffsets;
    queryOffsets.SetGlobalBuffer((__gm__ Index*)gm.queryOffsets);
    keyOffsets.SetGlobalBuffer((__gm__ Index*)gm.keyOffsets);
    schedule_.Init(pipe, {shape_.minDistance, shape_.maxDistance, tiling.deterministic != 0}, queryOffsets,
                   keyOffsets, shape_.sequences, shape_.queryRows, shape_.keyRows, shape_.groups, shape_.cores, core_,
                   kOffsetChunk);
    PairPitches(shape_.depth);
    ColumnPitches(shape_.depth);
    rows.SetOrgShape(shape_.rowBlock, shape_.groups * shape_.depth, kKeyBlock, kKeyBlock, shape_.heads * shape_.depth);
  }

  __aicore__ inline void Run() {
    const bool works = core_ < shape_.cores;
    if (works) Ready();
    SyncAll();
    if (works) Tiles();
    SyncAll();
    if (works) Conclude();
  }

 private:
  __aicore__ inline bool Wants(int32_t what) const { return (tiling_.wanted & what) != 0; }

  __aicore__ inline void InitWorkspace(GM_ADDR workspace) {
    const int64_t tile = int64_t{shape_.rowBlock} * kKeyBlock;
    GM_ADDR own = workspace + tiling_.coresAt + core_ * tiling_.coreBytes;
    sumQueries_.SetGlobalBuffer((__gm__ float*)(workspace + tiling_.queriesAt));
    rowLogs_.SetGlobalBuffer((__gm__ float*)(workspace + tiling_.rowsAt));
    rowDots_ = rowLogs_[shape_.queryRows * shape_.heads];
    tableArguments_.sumPositions.SetGlobalBuffer((__gm__ float*)(workspace + tiling_.positionsAt));
    tableArguments_.sumTimes.SetGlobalBuffer((__gm__ float*)(workspace + tiling_.timesAt));
    ringScores_.SetGlobalBuffer((__gm__ float*)own, 2 * tile);
    ringSlopes_.SetGlobalBuffer((__gm__ float*)(own + 2 * tile * 4), 2 * tile);
    ringWeights_.SetGlobalBuffer((__gm__ T*)(own + 4 * tile * 4), 2 * tile);
    ringGrads_.SetGlobalBuffer((__gm__ T*)(own + 4 * tile * 4 + 2 * tile * sizeof(T)), 2 * tile);
    GM_ADDR sums = own + 4 * tile * (4 + sizeof(T));
    sumKeys_.SetGlobalBuffer((__gm__ float*)sums, 2 * int64_t{kKeyBlock} * depth_);
    sumValues_.SetGlobalBuffer((__gm__ float*)(sums + 2 * int64_t{kKeyBlock} * depth_ * 4),
                               2 * int64_t{kKeyBlock} * width_);
  }

  __aicore__ inline void InitBuffers() {
    pipe_->InitBuffer(inScores_, 2, shape_.slab * sizeof(float));
    pipe_->InitBuffer(inSlopes_, 2, shape_.slab * sizeof(float));
    pipe_->InitBuffer(outWeights_, 2, shape_.slab * sizeof(T));
    pipe_->InitBuffer(outGrads_, 2, shape_.slab * sizeof(T));
    pipe_->InitBuffer(scratch_, shape_.slab * sizeof(float));
    pipe_->InitBuffer(other_, shape_.slab * sizeof(float));
    pipe_->InitBuffer(one_, 32);
    if (shape_.softmax) {
      pipe_->InitBuffer(inRows_, 2, 2 * kRowBlock * sizeof(float));
      pipe_->InitBuffer(found_, 2 * kRowBlock * sizeof(float));
      pipe_->InitBuffer(blocks_, 2 * kRowBlock * 32);
    }
    tile_.Init(pipe_, shape_, inputs_, scratch_.Get<float>());
    tables_.Init(pipe_, tiling_, core_, &tile_, tableArguments_, scratch_.Get<float>(), other_.Get<float>());
  }

  // --- before the tiles -------------------------------------------------------------------------------

  __aicore__ inline void Ready() {
    Duplicate(one_.Get<float>(), 1.0f, 8);
    PipeBarrier<PIPE_V>();
    auto zeros = outGrads_.AllocTensor<T>();
    Zero(zeros, shape_.slab);
    outGrads_.EnQue(zeros);
    zeros = outGrads_.DeQue<T>();
    auto floats = zeros.template ReinterpretCast<float>();
    const int64_t lanes = int64_t{tiling_.lanes} * shape_.heads;
    if (Wants(kWantQuery)) Clear(sumQueries_, shape_.queryRows * shape_.heads * shape_.depth, floats);
    if (Wants(kWantBias)) Clear(tableArguments_.biasGrad, tiling_.biasEntries, floats);
    if (Wants(kWantPosition)) Clear(tableArguments_.sumPositions, lanes * tiling_.positionPitch, floats);
    if (Wants(kWantTime)) Clear(tableArguments_.sumTimes, lanes * tiling_.timePitch, floats);
    outGrads_.FreeTensor(zeros);
    if (shape_.softmax) LookAtRows();
  }

  // This core's part of an array of zeros.
  __aicore__ inline void Clear(const GlobalTensor<float>& to, int64_t count, const LocalTensor<float>& zeros) {
    const int64_t chunk = shape_.slab * sizeof(T) / sizeof(float);
    for (int64_t at = core_ * chunk; at < count; at += shape_.cores * chunk) {
      const int64_t own = count - at < chunk ? count - at : chunk;
      DataCopyPad(to[at], zeros, DataCopyExtParams{1, static_cast<uint32_t>(own * sizeof(float)), 0, 0, 0});
    }
  }

  // log_sum and <grad, result> of this core's part of the rows, head by head.
  __aicore__ inline void LookAtRows() {
    const int32_t most = RoundDown(Smaller(shape_.slab / Larger(width_, kLanes), kRowBlock), 8);
    for (int64_t row = int64_t{core_} * most; row < shape_.queryRows; row += int64_t{shape_.cores} * most) {
      const int32_t count = shape_.queryRows - row < most ? static_cast<int32_t>(shape_.queryRows - row) : most;
      for (int32_t head = 0; head < shape_.heads; ++head) {
        LookAtRows(row, count, head);
      }
    }
  }

  __aicore__ inline void LookAtRows(int64_t row, int32_t count, int32_t head) {
    const int64_t first = (row * shape_.heads + head) * shape_.valueDepth;
    const int64_t pitch = int64_t{shape_.heads} * shape_.valueDepth;
    auto product = scratch_.Get<float>();
    auto other = other_.Get<float>();
    LoadRows(inScores_, grad_[first], count, shape_.valueDepth, width_, pitch);
    LoadRows(inSlopes_, result_[first], count, shape_.valueDepth, width_, pitch);
    auto grad = inScores_.DeQue<T>();
    auto result = inSlopes_.DeQue<T>();
    Widen(product, grad, count * width_);
    Widen(other, result, count * width_);
    PipeBarrier<PIPE_V>();
    inScores_.FreeTensor(grad);
    inSlopes_.FreeTensor(result);
    Mul(product, product, other, count * width_);
    // One number of each row comes as one block of its own.
    LoadRows(inScores_, logSum_[row * shape_.heads + head], count, 1, 8, shape_.heads);
    auto logs = inScores_.DeQue<float>();
    auto found = outWeights_.AllocTensor<T>();
    auto floats = found.template ReinterpretCast<float>();
    PipeBarrier<PIPE_V>();
    RowReduction<false>::Run(floats[kRowBlock], product, count, shape_.valueDepth, width_, other, found_.Get<float>());
    WholeReduceSum<float>(floats, logs, 1, count, 1, 1, 1);
    inScores_.FreeTensor(logs);
    outWeights_.EnQue(found);
    found = outWeights_.DeQue<T>();
    floats = found.template ReinterpretCast<float>();
    const DataCopyExtParams copy{1, static_cast<uint32_t>(count * sizeof(float)), 0, 0, 0};
    DataCopyPad(rowLogs_[head * shape_.queryRows + row], floats, copy);
    DataCopyPad(rowDots_[head * shape_.queryRows + row], floats[kRowBlock], copy);
    outWeights_.FreeTensor(found);
  }

  // --- the stream of tiles ----------------------------------------------------------------------------

  __aicore__ inline void Tiles() {
    Step next, now, past;
    next.exists = now.exists = past.exists = false;
    do {
      past = now;
      now = next;
      next.exists = NextStep(next);
      // The first slab is loaded before the message is posted: that waits until the last tile is out.
      if (now.Busy()) {
        pairs.WaitIterateAll();
        tile_.Begin(now);
        Start(now);
      }
      if (next.Busy()) {
        tile_.Fetch(next);
        FetchRows(next);
        PostPairs(next);
      }
      if (now.Busy()) Slopes(now);
      if (past.Busy()) WaitSums();
      if (now.Busy()) PostSums(now);
      if (past.exists && past.last) Collect(past);
    } while (next.exists || now.exists);
    tile_.Finish();
  }

  __aicore__ inline bool NextStep(Step& step) {
    if (queryAt_ >= queryEnd_) {
      if (queryBegin_ < queryEnd_ && head_ + 1 < shape_.heads / shape_.groups) {
        ++head_;
        queryAt_ = queryBegin_;
      } else if (!NextBlock()) {
        return false;
      }
    }
    step.exists = true;
    step.keyRow = place_.keyFirst + keyAt_;
    step.keys = keys_;
    step.head = group_ * (shape_.heads / shape_.groups) + head_;
    step.queryRow = place_.queryFirst + queryAt_;
    step.rows = Larger(Smaller(shape_.rowBlock, queryEnd_ - queryAt_), 0);
    step.first = head_ == 0 && queryAt_ == queryBegin_;
    queryAt_ += shape_.rowBlock;
    step.closing = queryAt_ >= queryEnd_;
    step.last = step.closing && (head_ + 1 == shape_.heads / shape_.groups || step.rows == 0);
    step.unit = block_ % 2;
    step.sequence = place_.sequence;
    step.lower = step.upper = false;
    step.column = 0;
    if (step.rows > 0) {
      step.slot = stepNumber_++ % 2;
      FindEdges(step);
    }
    return true;
  }

  // The next block of keys, of this unit or of the next one.
  __aicore__ inline bool NextBlock() {
    keyAt_ += kKeyBlock;
    if (keyAt_ >= keyEnd_) {
      if (!schedule_.Next(place_, group_)) return false;
      keyAt_ = tiling_.deterministic ? 0 : place_.block * kKeyBlock;
      keyEnd_ = tiling_.deterministic ? place_.keys : Smaller(keyAt_ + kKeyBlock, place_.keys);
    }
    ++block_;
    head_ = 0;
    keys_ = Smaller(kKeyBlock, keyEnd_ - keyAt_);
    queryBegin_ = 0;
    queryEnd_ = place_.real ? place_.queries : 0;
    if (queryEnd_ > 0 && Windowed()) {
      const auto queries = inputs_.queryColumns[place_.queryFirst];
      firstColumn_ = static_cast<int64_t>(inputs_.keyColumns.GetValue(place_.keyFirst + keyAt_));
      lastColumn_ = static_cast<int64_t>(inputs_.keyColumns.GetValue(place_.keyFirst + keyAt_ + keys_ - 1));
      queryBegin_ = CountBelow(queries, place_.queries, firstColumn_ + shape_.minDistance);
      queryEnd_ = CountBelow(queries, place_.queries, lastColumn_ + shape_.maxDistance + 1);
    }
    queryAt_ = queryBegin_;
    return true;
  }

  __aicore__ inline bool Windowed() const {
    return shape_.minDistance > -kFarColumn || shape_.maxDistance < kFarColumn;
  }

  __aicore__ inline void FindEdges(Step& step) {
    if (shape_.positionEntries > 0 || shape_.bias.columns > 0 || shape_.mask.columns > 0)
      step.column = static_cast<int32_t>(inputs_.keyColumns.GetValue(step.keyRow));
    if (!Windowed()) return;
    const int64_t first = static_cast<int64_t>(inputs_.queryColumns.GetValue(step.queryRow));
    const int64_t last = static_cast<int64_t>(inputs_.queryColumns.GetValue(step.queryRow + step.rows - 1));
    step.lower = first - lastColumn_ < shape_.minDistance;
    step.upper = last - firstColumn_ > shape_.maxDistance;
  }

  // --- the cube ---------------------------------------------------------------------------------------

  // Pitches of products that share an object. Each call is a message to the cube core, so they are said once where both
  // depths are the same.
  __aicore__ inline void PairPitches(int32_t depth) {
    pairs.SetOrgShape(shape_.rowBlock, kKeyBlock, shape_.heads * depth, shape_.groups * depth, kKeyBlock);
  }
  __aicore__ inline void ColumnPitches(int32_t depth) {
    columns.SetOrgShape(kKeyBlock, shape_.heads * depth, shape_.rowBlock, shape_.rowBlock, RoundUp(depth, kColumnUnit));
  }

  __aicore__ inline bool TwoDepths() const { return shape_.depth != shape_.valueDepth; }

  __aicore__ inline void PostPairs(const Step& step) {
    const int64_t group = step.head / (shape_.heads / shape_.groups);
    if (TwoDepths()) PairPitches(shape_.depth);
    pairs.SetSingleShape(step.rows, step.keys, shape_.depth);
    pairs.SetTensorA(query_[(step.queryRow * shape_.heads + step.head) * shape_.depth]);
    pairs.SetTensorB(key_[(step.keyRow * shape_.groups + group) * shape_.depth], true);
    pairs.template IterateAll<false>(ringScores_[TileAt(step)], 0, false, false);
    if (TwoDepths()) PairPitches(shape_.valueDepth);
    pairs.SetSingleShape(step.rows, step.keys, shape_.valueDepth);
    pairs.SetTensorA(grad_[(step.queryRow * shape_.heads + step.head) * shape_.valueDepth]);
    pairs.SetTensorB(value_[(step.keyRow * shape_.groups + group) * shape_.valueDepth], true);
    // The cube works in order: who waits for this one has the other as well.
    pairs.template IterateAll<false>(ringSlopes_[TileAt(step)], 0, false, true);
  }

  __aicore__ inline void PostSums(const Step& step) {
    const int64_t group = step.head / (shape_.heads / shape_.groups);
    const int64_t queryRow = step.queryRow * shape_.heads + step.head;
    if (Wants(kWantValue)) {
      if (TwoDepths()) ColumnPitches(shape_.valueDepth);
      columns.SetSingleShape(step.keys, shape_.valueDepth, step.rows);
      columns.SetTensorA(ringWeights_[TileAt(step)], true);
      columns.SetTensorB(grad_[queryRow * shape_.valueDepth]);
      columns.template IterateAll<false>(sumValues_[int64_t{step.unit} * kKeyBlock * width_], !step.first, false,
                                         !Wants(kWantKey));
    }
    if (Wants(kWantKey)) {
      if (TwoDepths()) ColumnPitches(shape_.depth);
      columns.SetSingleShape(step.keys, shape_.depth, step.rows);
      columns.SetTensorA(ringGrads_[TileAt(step)], true);
      columns.SetTensorB(query_[queryRow * shape_.depth]);
      columns.template IterateAll<false>(sumKeys_[int64_t{step.unit} * kKeyBlock * depth_], !step.first, false, true);
    }
    if (Wants(kWantQuery)) {
      rows.SetSingleShape(step.rows, shape_.depth, step.keys);
      rows.SetTensorA(ringGrads_[TileAt(step)]);
      rows.SetTensorB(key_[(step.keyRow * shape_.groups + group) * shape_.depth]);
      rows.template IterateAll<false>(sumQueries_[queryRow * shape_.depth], 1, false, true);
    }
  }

  __aicore__ inline void WaitSums() {
    if (Wants(kWantValue | kWantKey)) columns.WaitIterateAll();
    if (Wants(kWantQuery)) rows.WaitIterateAll();
  }

  __aicore__ inline int64_t TileAt(const Step& step) const { return int64_t{step.slot} * shape_.rowBlock * kKeyBlock; }

  // --- gradients of scores ----------------------------------------------------------------------------

  __aicore__ inline void FetchRows(const Step& step) {
    if (!shape_.softmax) return;
    auto to = inRows_.AllocTensor<float>();
    const int64_t first = step.head * shape_.queryRows + step.queryRow;
    CopyIn(to, rowLogs_[first], step.rows);
    CopyIn(to[kRowBlock], rowDots_[first], step.rows);
    inRows_.EnQue(to);
  }

  __aicore__ inline void Start(const Step& step) {
    if (shape_.softmax) currentRows_ = inRows_.DeQue<float>();
    ahead_ = tile_.Cut(0);
    if (ahead_.columns > 0) Load(step, ahead_);
  }

  __aicore__ inline void Load(const Step& step, const Slab& slab) {
    const int64_t at = TileAt(step) + int64_t{slab.row} * kKeyBlock + slab.low;
    LoadRows(inScores_, ringScores_[at], slab.rows, slab.columns, slab.width, kKeyBlock);
    LoadRows(inSlopes_, ringSlopes_[at], slab.rows, slab.columns, slab.width, kKeyBlock);
  }

  __aicore__ inline void Slopes(const Step& step) {
    tile_.Prepare(scratch_.Get<float>());
    if (shape_.softmax) {
      auto blocks = blocks_.Get<float>();
      Brcb(blocks, currentRows_, (step.rows + 7) / 8, BrcbRepeatParams{1, 8});
      Brcb(blocks[kRowBlock * 8], currentRows_[kRowBlock], (step.rows + 7) / 8, BrcbRepeatParams{1, 8});
      PipeBarrier<PIPE_V>();
      inRows_.FreeTensor(currentRows_);
    }
    while (ahead_.row < step.rows) {
      const Slab slab = ahead_;
      LocalTensor<float> scores, slopes;
      if (slab.columns > 0) {
        scores = inScores_.DeQue<float>();
        slopes = inSlopes_.DeQue<float>();
      }
      ahead_.row = slab.row + slab.rows;
      if (ahead_.row < step.rows) {
        ahead_ = tile_.Cut(ahead_.row);
        if (ahead_.columns > 0) Load(step, ahead_);
      }
      if (slab.columns > 0) {
        if (shape_.softmax) {
          Softmax(step, slab, scores, slopes);
        } else {
          Silu(step, slab, scores, slopes);
        }
        Emit(outGrads_, ringGrads_, step, slab, slopes);
        if (Wants(kWantBias | kWantPosition)) tables_.AddRows(step, slab, slopes);
        if (Wants(kWantTime)) tables_.AddTimes(slab, slopes);
        inScores_.FreeTensor(scores);
        inSlopes_.FreeTensor(slopes);
      }
      Blank(outWeights_, ringWeights_, step, slab);
      Blank(outGrads_, ringGrads_, step, slab);
    }
    tile_.End();
    if (Wants(kWantTime) && step.closing) tables_.FlushTimes(step);
  }

  // Both emit weights, and leave gradients of scores in `slopes`.
  __aicore__ inline void Silu(const Step& step, const Slab& slab, const LocalTensor<float>& x,
                              const LocalTensor<float>& slopes) {
    auto gates = scratch_.Get<float>();
    auto weights = other_.Get<float>();
    const int32_t count = slab.Count();
    Draw(slab, slopes);
    Muls(x, x, -shape_.scale, count);
    PipeBarrier<PIPE_V>();
    AddBias(x, slab, true);
    // exp gives infinity for a hidden pair, so that its gate is 0, and with it all that follows.
    tile_.Hide(x, slab, kNoSilu, gates);
    Exp(gates, x, count);
    PipeBarrier<PIPE_V>();
    Adds(gates, gates, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Div(gates, one_.Get<float>(), gates, kLanes, (count + kLanes - 1) / kLanes, BinaryRepeatParams{1, 0, 1, 8, 0, 8});
    PipeBarrier<PIPE_V>();
    Mul(weights, x, gates, count);
    PipeBarrier<PIPE_V>();
    Sub(x, weights, x, count);
    Mul(slopes, slopes, gates, count);
    if (tile_.Drops()) tile_.Drop(weights, slab);
    Emit(outWeights_, ringWeights_, step, slab, weights);
    PipeBarrier<PIPE_V>();
    Adds(x, x, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Mul(slopes, slopes, x, count);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Softmax(const Step& step, const Slab& slab, const LocalTensor<float>& x,
                                 const LocalTensor<float>& slopes) {
    const int32_t count = slab.Count();
    auto blocks = blocks_.Get<float>()[slab.row * 8];
    Draw(slab, slopes);
    Muls(x, x, shape_.scale, count);
    Muls(slopes, slopes, shape_.postScale, count);
    PipeBarrier<PIPE_V>();
    AddBias(x, slab, false);
    tile_.Hide(x, slab, kNoScore, scratch_.Get<float>());
    MinusBlocks(x, blocks, slab.rows, slab.width);
    MinusBlocks(slopes, blocks[kRowBlock * 8], slab.rows, slab.width);
    PipeBarrier<PIPE_V>();
    Exp(x, x, count);
    PipeBarrier<PIPE_V>();
    Mul(slopes, slopes, x, count);
    if (tile_.Drops()) tile_.Drop(x, slab);
    Emit(outWeights_, ringWeights_, step, slab, x);
    PipeBarrier<PIPE_V>();
  }

  // Slopes of pairs that are dropped count for nothing; weights follow when scores have been taken from them.
  __aicore__ inline void Draw(const Slab& slab, const LocalTensor<float>& slopes) {
    if (!tile_.Drops()) return;
    tile_.Draw(slab, scratch_.Get<float>());
    tile_.Drop(slopes, slab);
  }

  __aicore__ inline void AddBias(const LocalTensor<float>& x, const Slab& slab, bool negative) {
    if (Wants(kWantTime)) {
      auto entries = tables_.Entries();
      tile_.Bias(x, slab, negative, scratch_.Get<float>(), &entries);
    } else {
      tile_.Bias(x, slab, negative, scratch_.Get<float>());
    }
  }

  __aicore__ inline void Emit(Output& queue, const GlobalTensor<T>& ring, const Step& step, const Slab& slab,
                              const LocalTensor<float>& x) {
    auto to = queue.AllocTensor<T>();
    Narrow(to, x, slab.Count());
    queue.EnQue(to);
    StoreRows(queue, ring[TileAt(step) + int64_t{slab.row} * kKeyBlock + slab.low], slab.rows, slab.columns, slab.width,
              kKeyBlock);
  }

  __aicore__ inline void Blank(Output& queue, const GlobalTensor<T>& ring, const Step& step, const Slab& slab) {
    const auto tile = ring[TileAt(step)];
    ClearColumns(queue, tile, slab, 0, slab.low, shape_.slab);
    ClearColumns(queue, tile, slab, slab.low + slab.columns, step.keys, shape_.slab);
  }

  // --- results ----------------------------------------------------------------------------------------

  __aicore__ inline float ScoreFactor() const { return shape_.softmax ? 1.0f : shape_.postScale; }

  // Gradients of a block of keys and values.
  __aicore__ inline void Collect(const Step& step) {
    const int64_t group = step.head / (shape_.heads / shape_.groups);
    const int64_t row = step.keyRow * shape_.groups + group;
    if (Wants(kWantKey)) {
      CollectRows(step, sumKeys_, depth_, keyGrad_[row * shape_.depth], shape_.depth, shape_.scale * ScoreFactor());
    }
    if (Wants(kWantValue)) {
      // Weights of silu come with the other sign.
      CollectRows(step, sumValues_, width_, valueGrad_[row * shape_.valueDepth], shape_.valueDepth,
                  shape_.softmax ? shape_.postScale : -shape_.postScale);
    }
  }

  __aicore__ inline void CollectRows(const Step& step, const GlobalTensor<float>& sums, int32_t width,
                                     const GlobalTensor<T>& to, int32_t depth, float factor) {
    const int64_t pitch = int64_t{shape_.groups} * depth;
    const int32_t most = shape_.slab / width;
    for (int32_t row = 0; row < step.keys; row += most) {
      const int32_t count = Smaller(most, step.keys - row);
      if (step.rows == 0) {
        StoreZeros(outGrads_, to[row * pitch], count, depth, pitch);
        continue;
      }
      auto x = inScores_.AllocTensor<float>();
      DataCopy(x, sums[(int64_t{step.unit} * kKeyBlock + row) * width], count * width);
      inScores_.EnQue(x);
      x = inScores_.DeQue<float>();
      Muls(x, x, factor, count * width);
      PipeBarrier<PIPE_V>();
      auto narrow = outGrads_.AllocTensor<T>();
      Narrow(narrow, x, count * width);
      outGrads_.EnQue(narrow);
      inScores_.FreeTensor(x);
      StoreRows(outGrads_, to[row * pitch], count, depth, width, pitch);
    }
  }

  // Behind the last tile of all cores: what they have summed together.
  __aicore__ inline void Conclude() {
    if (Wants(kWantQuery)) NarrowQueries();
    tables_.Conclude(inScores_);
  }

  __aicore__ inline void NarrowQueries() {
    const int64_t count = shape_.queryRows * shape_.heads * shape_.depth;
    const float factor = shape_.scale * ScoreFactor();
    for (int64_t at = int64_t{core_} * shape_.slab; at < count; at += int64_t{shape_.cores} * shape_.slab) {
      const int32_t own = count - at < shape_.slab ? static_cast<int32_t>(count - at) : shape_.slab;
      auto x = inScores_.AllocTensor<float>();
      CopyIn(x, sumQueries_[at], own);
      inScores_.EnQue(x);
      x = inScores_.DeQue<float>();
      Muls(x, x, factor, own);
      PipeBarrier<PIPE_V>();
      auto narrow = outGrads_.AllocTensor<T>();
      Narrow(narrow, x, own);
      outGrads_.EnQue(narrow);
      inScores_.FreeTensor(x);
      narrow = outGrads_.DeQue<T>();
      DataCopyPad(queryGrad_[at], narrow, DataCopyExtParams{1, static_cast<uint32_t>(own * sizeof(T)), 0, 0, 0});
      outGrads_.FreeTensor(narrow);
    }
  }

  TPipe* pipe_;
  JaggedAttentionBackwardTiling tiling_;
  AttentionShape shape_;
  TileInputs<Index> inputs_;
  GlobalTensor<T> grad_, result_, query_, key_, value_, queryGrad_, keyGrad_, valueGrad_, ringWeights_, ringGrads_;
  GlobalTensor<float> logSum_, sumQueries_, rowLogs_, rowDots_, ringScores_, ringSlopes_, sumKeys_, sumValues_;
  TableArguments tableArguments_;
  Input inScores_, inSlopes_, inRows_;
  Output outWeights_, outGrads_;
  TBuf<TPosition::VECCALC> scratch_, other_, one_, found_, blocks_;
  LocalTensor<float> currentRows_;
  AttentionTile<Index> tile_;
  TableGradients<Index> tables_;
  Schedule<Index, KeyBlocks> schedule_;
  Slab ahead_;
  Place place_;
  int64_t firstColumn_ = 0, lastColumn_ = 0;
  int32_t core_ = 0, depth_ = 0, width_ = 0, group_ = 0, head_ = 0, block_ = 0, stepNumber_ = 0;
  int32_t keyAt_ = 0, keyEnd_ = 0, keys_ = 0, queryBegin_ = 0, queryAt_ = 0, queryEnd_ = 0;
};

}  // namespace turbogr
