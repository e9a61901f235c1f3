// Gradients of sampled softmax over jagged groups, in two sweeps over tiles of logits that are computed anew.
//
// Rows in blocks meet negatives: shares P = exp(logit - log_sum) go back to the workspace in the dtype of the inputs,
// and the cube adds P · negative to the block's sums. What the row's own positive contributes is added on the vector
// core. Then negatives in blocks meet rows, for Pᵀ · query. A block belongs to one core, which adds its tiles up in
// order: no sum depends on the number of cores, and nothing is added across cores.
//
// While the vector core turns one tile of logits into shares, the cube computes the next tile, and the product of the
// shares before; a block's sums are fetched while the next block is under way.
#pragma once

#include "sampled_softmax_backward_tiling_data.h"
#include "sampled_softmax_common.h"

namespace turbogr {

template <typename T, typename Index>
class SampledSoftmaxBackwardKernel {
 public:
  using Plain = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T>;
  using Turned = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T, true>;
  using Wide = matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>;

  matmul::Matmul<Plain, Turned, Wide> logits;
  matmul::Matmul<Plain, Plain, Wide> product;

  __aicore__ inline SampledSoftmaxBackwardKernel(TPipe* pipe, const SampledSoftmaxBackwardTiling& tiling)
      : pipe_(pipe), tiling_(tiling), shape_(tiling.shape) {}

  __aicore__ inline void InitInputs(GM_ADDR grad, GM_ADDR logSum, GM_ADDR query, GM_ADDR positive, GM_ADDR negative,
                                    GM_ADDR queryOffsets, GM_ADDR negativeOffsets, GM_ADDR positiveIds,
                                    GM_ADDR negativeIds, GM_ADDR negativeScales) {
    const int64_t rows = shape_.rows, negatives = shape_.negatives, width = shape_.width, groups = shape_.groups;
    grad_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(grad), rows);
    logSum_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(logSum), rows);
    positive_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(positive), rows * width);
    rows_.x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(query), rows * width);
    rows_.ids.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(positiveIds), rows);
    rows_.offsets.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(queryOffsets), groups + 1);
    negatives_.x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(negative), negatives * width);
    negatives_.ids.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(negativeIds), negatives);
    negatives_.offsets.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(negativeOffsets), groups + 1);
    scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(negativeScales), groups);
  }

  __aicore__ inline void InitResults(GM_ADDR queryGrad, GM_ADDR positiveGrad, GM_ADDR negativeGrad, GM_ADDR workspace) {
    const int64_t rows = int64_t{shape_.rows} * shape_.width, negatives = int64_t{shape_.negatives} * shape_.width;
    queryGrad_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(queryGrad), tiling_.wantsQuery ? rows : 0);
    positiveGrad_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(positiveGrad), tiling_.wantsPositive ? rows : 0);
    negativeGrad_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(negativeGrad), tiling_.wantsNegative ? negatives : 0);
    GM_ADDR own = workspace + GetBlockIdx() * shape_.coreBytes;
    slots_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(own), 2 * tiling_.slot);
    own += 2 * tiling_.slot * sizeof(float);
    sums_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(own), 2 * tiling_.sums);
    own += 2 * tiling_.sums * sizeof(float);
    shares_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(own), 2 * tiling_.slot);
    InitBuffers();
  }

  __aicore__ inline void Run() {
    if (tiling_.wantsQuery) {
      WriteZerosAround(queryGrad_, rows_.offsets, shape_.rows);
    }
    if (tiling_.wantsPositive) {
      WriteZerosAround(positiveGrad_, rows_.offsets, shape_.rows);
    }
    if (tiling_.wantsNegative) {
      WriteZerosAround(negativeGrad_, negatives_.offsets, shape_.negatives);
    }
    if (tiling_.wantsQuery || tiling_.wantsPositive) {
      RunSweep<true>(rows_, negatives_, tiling_.rowSweep, tiling_.wantsQuery);
    }
    if (tiling_.wantsNegative) {
      lift_ = IsSameType<T, half>::value ? LiftOfGradients() : 1.0f;
      RunSweep<false>(negatives_, rows_, tiling_.negativeSweep, true);
    }
  }

 private:
  static constexpr int32_t kElements = sizeof(T) == 2 ? kStripElements : kStripElements / 2;
  static constexpr int32_t kRows = kElements / kStrip;  // of a strip
  static constexpr int32_t kFoldRows = 32;
  // Shares are at most one, and in fp16 small ones would fade: they are computed as so many times as much.
  static constexpr float kLift = IsSameType<T, half>::value ? 32768.0f : 1.0f;
  static constexpr float kLiftLog = IsSameType<T, half>::value ? 10.397207708399179f : 0.0f;

  // Rows or negatives.
  struct Side {
    GlobalTensor<T> x;
    GlobalTensor<int32_t> ids;
    GlobalTensor<Index> offsets;
  };

  // What the end of a unit needs, when the next one has begun.
  struct Kept {
    LocalTensor<float> own;     // slope of the positive's logit, for each row
    LocalTensor<float> factor;  // of the sums, for each row
    float scale;                // of the sums
  };

  __aicore__ inline void InitBuffers() {
    const SampledSweep& rows = tiling_.rowSweep;
    const SampledSweep& negatives = tiling_.negativeSweep;
    const int32_t rowBlock = rows.block;
    tasks_.Init(pipe_, shape_.groups);
    pipe_->InitBuffer(inQueue_, 2, kElements * sizeof(float));
    pipe_->InitBuffer(outQueue_, 2, kElements * sizeof(T));
    pipe_->InitBuffer(rowQueue_, 1, 2 * rowBlock * sizeof(float));
    pipe_->InitBuffer(columnQueue_, 1, 2 * negatives.tile * sizeof(float));
    pipe_->InitBuffer(wideBuffer_, (2 * kWideElements + kFoldRows * kLanes) * sizeof(float));
    const int32_t numbers = (5 + 2 * kBlockFloats) * rowBlock;
    pipe_->InitBuffer(stateBuffer_, numbers * sizeof(float));
    wide_ = wideBuffer_.Get<float>();
    const LocalTensor<float> state = stateBuffer_.Get<float>();
    Duplicate(state, 0.0f, numbers);
    Settle();
    for (int32_t set = 0; set < 2; ++set) {
      kept_[set].own = state[set * rowBlock];
      kept_[set].factor = state[(2 + set) * rowBlock];
    }
    bias_ = state[4 * rowBlock];
    biasBlocks_ = state[5 * rowBlock];
    blocks_ = state[(5 + kBlockFloats) * rowBlock];
    if (shape_.hasIds) {
      const int32_t block = rows.block > negatives.block ? rows.block : negatives.block;
      hits_.Init(pipe_, block, rows.tile > negatives.tile ? rows.tile : negatives.tile, kElements);
    }
  }

  __aicore__ inline void WriteZerosAround(const GlobalTensor<T>& x, const GlobalTensor<Index>& offsets, int64_t count) {
    const int64_t first = offsets.GetValue(0), last = offsets.GetValue(shape_.groups), bytes = kElements * sizeof(T);
    WriteZeros(x, 0, first * shape_.width, outQueue_, bytes);
    WriteZeros(x, last * shape_.width, count * shape_.width, outQueue_, bytes);
  }

  // A power of two that takes all gradients to less than 2^15.
  __aicore__ inline float LiftOfGradients() {
    float most = 0.0f;
    for (int32_t first = 0; first < shape_.rows; first += kElements) {
      const int32_t count = Lesser(kElements, shape_.rows - first);
      LocalTensor<float> x = inQueue_.template AllocTensor<float>();
      DataCopyPad(x, grad_[first], DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(float)), 0, 0, 0},
                  DataCopyPadExtParams<float>{false, 0, 0, 0});
      inQueue_.EnQue(x);
      x = inQueue_.template DeQue<float>();
      Abs(x, x, count);
      Settle();
      ReduceMax(blocks_, x, wide_, count, false);
      Await<HardEvent::V_S>(pipe_);
      const float found = blocks_.GetValue(0);
      Await<HardEvent::S_V>(pipe_);
      inQueue_.FreeTensor(x);
      most = found > most ? found : most;
    }
    float lift = 1.0f;
    if (most > 0.0f && most < 1.0e38f) {
      for (; most * lift >= 32768.0f; lift *= 0.5f) {
      }
      for (; most * lift < 16384.0f && lift < 1.0e30f; lift *= 2.0f) {
      }
    }
    return lift;
  }

  // --- a sweep ---------------------------------------------------------------------------------------

  template <bool byRow>
  __aicore__ inline void RunSweep(const Side& own, const Side& other, const SampledSweep& sweep, bool paired) {
    sweep_ = sweep;
    tasks_.Start(own.offsets, other.offsets, sweep, paired);
    logits.SetOrgShape(sweep.block, sweep.tile, shape_.width);
    product.SetOrgShape(sweep.block, shape_.width, sweep.tile);
    Task now, next, behind;  // behind: its product is under way
    bool under = false;
    bool some = tasks_.Next(&now);
    if (some) {
      IssueLogits(own, other, now);
    }
    while (some) {
      if (now.head) {
        Begin<byRow>(own, now);
      }
      const bool more = tasks_.Next(&next);
      if (now.columns > 0) {
        logits.WaitIterateAll();
        logits.End();
      }
      if (more) {
        IssueLogits(own, other, next);
      }
      Weigh<byRow>(other, now);
      if (under) {
        product.WaitIterateAll();
        product.End();
      }
      IssueProduct(other, now);
      if (under && behind.last) {
        Finish<byRow>(behind);
      }
      under = now.columns > 0;
      if (!under) {
        Finish<byRow>(now);
      }
      behind = now;
      now = next;
      some = more;
    }
    if (under) {
      product.WaitIterateAll();
      product.End();
      Finish<byRow>(behind);
    }
  }

  // Slots may still be under way to the unified buffer when the cube is to overwrite them.
  __aicore__ inline void IssueLogits(const Side& own, const Side& other, const Task& task) {
    if (task.columns == 0) {
      return;
    }
    Await<HardEvent::MTE2_MTE3>(pipe_);
    logits.SetSingleShape(task.unit.count, task.columns, shape_.width);
    logits.SetTensorA(own.x[static_cast<int64_t>(task.unit.first) * shape_.width]);
    logits.SetTensorB(other.x[static_cast<int64_t>(task.unit.otherFirst + task.column) * shape_.width], true);
    logits.template IterateAll<false>(slots_[task.slot * tiling_.slot], 0, false, true);
  }

  __aicore__ inline void IssueProduct(const Side& other, const Task& task) {
    if (task.columns == 0) {
      return;
    }
    Await<HardEvent::MTE2_MTE3>(pipe_);
    product.SetSingleShape(task.unit.count, shape_.width, task.columns);
    product.SetTensorA(shares_[task.slot * tiling_.slot]);
    product.SetTensorB(other.x[static_cast<int64_t>(task.unit.otherFirst + task.column) * shape_.width]);
    product.template IterateAll<false>(sums_[task.set * tiling_.sums], task.head ? 0 : 1, false, true);
  }

  // --- logits to shares ------------------------------------------------------------------------------

  template <bool byRow>
  __aicore__ inline void Weigh(const Side& other, const Task& task) {
    if (task.columns == 0) {
      return;
    }
    const int32_t first = task.unit.otherFirst + task.column;
    if (shape_.hasIds) {
      hits_.LoadColumns(other.ids[first], task.columns);
    }
    if constexpr (!byRow) {
      LoadColumns(first, task.columns);
    }
    const int32_t step = EvenPart(task.unit.count, kRows);
    for (int32_t column = 0; column < task.columns; column += kStrip) {
      for (int32_t row = 0; row < task.unit.count; row += step) {
        const int32_t columns = Lesser(kStrip, task.columns - column);
        WeighStrip<byRow>(task, row, Lesser(step, task.unit.count - row), column, columns);
      }
    }
    if (shape_.hasIds) {
      hits_.FreeColumns();
    }
    if constexpr (!byRow) {
      columnQueue_.FreeTensor(columnBias_);
    }
  }

  // What is added to the logits of each row of a tile's columns, and what its shares are multiplied by.
  __aicore__ inline void LoadColumns(int32_t first, int32_t count) {
    columnBias_ = columnQueue_.template AllocTensor<float>();
    columnWeight_ = columnBias_[sweep_.tile];
    const DataCopyExtParams copy{1, static_cast<uint32_t>(count * sizeof(float)), 0, 0, 0};
    const DataCopyPadExtParams<float> pad{false, 0, 0, 0};
    DataCopyPad(columnBias_, logSum_[first], copy, pad);
    DataCopyPad(columnWeight_, grad_[first], copy, pad);
    columnQueue_.EnQue(columnBias_);
    columnBias_ = columnQueue_.template DeQue<float>();
    Muls(columnBias_, columnBias_, -1.0f, count);
    Muls(columnWeight_, columnWeight_, lift_, count);
    Settle();
  }

  template <bool byRow>
  __aicore__ inline void WeighStrip(const Task& task, int32_t row, int32_t rows, int32_t column, int32_t columns) {
    const int32_t pitch = RoundedUp(columns, kLanes);
    const GlobalTensor<float> logits = slots_[task.slot * tiling_.slot + row * sweep_.tile + column];
    LocalTensor<float> x = LoadStrip(inQueue_, logits, rows, columns, pitch, sweep_.tile);
    for (int32_t c = 0; c < columns; c += kLanes) {
      Muls(x[c], x[c], scale_, Lesser(kLanes, columns - c), rows, RowStrides(pitch, pitch));
    }
    Settle();
    for (int32_t c = 0; c < columns; c += kLanes) {
      const int32_t lanes = Lesser(kLanes, columns - c);
      if constexpr (byRow) {
        Add(x[c], x[c], biasBlocks_[row * kBlockFloats], lanes, rows, ByRow(pitch));
      } else {
        Add(x[c], x[c], columnBias_[column + c], lanes, rows, ByColumn(pitch));
      }
    }
    Settle();
    if (shape_.hasIds) {
      hits_.Drop(x, row, rows, column, columns, pitch);
    }
    LocalTensor<T> shares = outQueue_.template AllocTensor<T>();
    ToShares<byRow>(shares, x, rows, column, columns, pitch);
    inQueue_.FreeTensor(x);
    outQueue_.EnQue(shares);
    shares = outQueue_.template DeQue<T>();
    StoreShares(shares, task.slot, row, rows, column, columns, pitch);
    outQueue_.FreeTensor(shares);
  }

  template <bool byRow>
  __aicore__ inline void ToShares(const LocalTensor<T>& shares, const LocalTensor<float>& x, int32_t rows,
                                  int32_t column, int32_t columns, int32_t pitch) {
    // The last step writes the result: no copy where it is as wide as what it comes from.
    constexpr bool wide = IsSameType<T, float>::value;
    const LocalTensor<float> result = wide ? shares.template ReinterpretCast<float>() : x;
    const LocalTensor<float> exponentials = byRow ? result : x;
    for (int32_t c = 0; c < columns; c += kLanes) {
      Exp(exponentials[c], x[c], Lesser(kLanes, columns - c), rows, RowStrides(pitch, pitch));
    }
    Settle();
    if constexpr (!byRow) {
      for (int32_t c = 0; c < columns; c += kLanes) {
        Mul(result[c], x[c], columnWeight_[column + c], Lesser(kLanes, columns - c), rows, ByColumn(pitch));
      }
      Settle();
    }
    if constexpr (!wide) {
      const uint8_t dst = static_cast<uint8_t>(pitch * sizeof(T) / 32);
      const uint8_t src = static_cast<uint8_t>(pitch / kBlockFloats);
      for (int32_t c = 0; c < columns; c += kLanes) {
        const uint64_t lanes = Lesser(kLanes, columns - c);
        Cast(shares[c], x[c], RoundMode::CAST_RINT, lanes, rows, {1, 1, dst, src});
      }
      Settle();
    }
  }

  __aicore__ inline void StoreShares(const LocalTensor<T>& shares, int32_t slot, int32_t row, int32_t rows,
                                     int32_t column, int32_t columns, int32_t pitch) {
    const uint32_t bytes = columns * sizeof(T), between = (sweep_.tile - columns) * sizeof(T);
    const uint32_t gap = pitch * sizeof(T) / 32 - (bytes + 31) / 32;
    DataCopyPad(shares_[slot * tiling_.slot + row * sweep_.tile + column], shares,
                DataCopyExtParams{static_cast<uint16_t>(rows), bytes, gap, between, 0});
  }

  // --- blocks ----------------------------------------------------------------------------------------

  // Rows that are widened at a time; wide ones are folded to sums in a buffer of their own.
  __aicore__ inline int32_t RowsAtOnce() const {
    const int32_t most = shape_.width > kLanes ? kFoldRows : sweep_.block;
    return Lesser(Lesser(sweep_.block, most), kWideElements / shape_.width / 8 * 8);
  }

  template <bool byRow>
  __aicore__ inline void Begin(const Side& own, const Task& task) {
    const Unit& unit = task.unit;
    scale_ = shape_.hasScales ? shape_.scale * scales_.GetValue(unit.group) : shape_.scale;
    if (shape_.hasIds && unit.otherCount > 0) {
      hits_.LoadRows(own.ids[unit.first], unit.count);
    }
    if constexpr (byRow) {
      BeginRows(unit, kept_[task.set]);
    } else {
      kept_[task.set].scale = scale_ / lift_;
    }
  }

  // Slopes of the positives' logits, gradients of positives, and what shares of the rows come from.
  __aicore__ inline void BeginRows(const Unit& unit, const Kept& kept) {
    LocalTensor<float> logSum = rowQueue_.template AllocTensor<float>();
    LocalTensor<float> grad = logSum[sweep_.block];
    const DataCopyExtParams copy{1, static_cast<uint32_t>(unit.count * sizeof(float)), 0, 0, 0};
    const DataCopyPadExtParams<float> pad{false, 0, 0, 0};
    DataCopyPad(logSum, logSum_[unit.first], copy, pad);
    DataCopyPad(grad, grad_[unit.first], copy, pad);
    rowQueue_.EnQue(logSum);
    logSum = rowQueue_.template DeQue<float>();
    const int32_t numbers = RoundedUp(unit.count, 8);
    Muls(bias_, logSum, -1.0f, numbers);
    Muls(kept.factor, grad, scale_ / kLift, numbers);
    Muls(grad, grad, shape_.scale, numbers);
    Settle();
    Adds(bias_, bias_, kLiftLog, numbers);
    Settle();
    Spread(biasBlocks_, bias_, numbers);
    const int32_t step = RowsAtOnce();
    for (int32_t row = 0; row < unit.count; row += step) {
      BeginSomeRows(unit.first + row, Lesser(step, unit.count - row), kept.own[row], logSum[row], grad[row]);
    }
    rowQueue_.FreeTensor(logSum);
  }

  __aicore__ inline void BeginSomeRows(int32_t first, int32_t rows, const LocalTensor<float>& own,
                                       const LocalTensor<float>& logSum, const LocalTensor<float>& slope) {
    const LocalTensor<float> query = wide_, both = wide_[kWideElements], fold = wide_[2 * kWideElements];
    const int32_t elements = rows * shape_.width, numbers = RoundedUp(rows, 8);
    const int64_t place = static_cast<int64_t>(first) * shape_.width;
    LoadWide(inQueue_, query, rows_.x[place], elements);
    LoadWide(inQueue_, both, positive_[place], elements);
    Settle();
    Mul(both, both, query, elements);
    Settle();
    ReduceRows<true>(own, both, fold, rows, shape_.width);
    Settle();
    Muls(own, own, shape_.scale, numbers);
    Settle();
    Sub(own, own, logSum, numbers);
    Settle();
    Exp(own, own, numbers);
    Settle();
    Adds(own, own, -1.0f, numbers);
    Settle();
    Mul(own, own, slope, numbers);
    Settle();
    if (tiling_.wantsPositive) {
      Spread(blocks_, own, rows);
      Settle();
      MultiplyRows(query, blocks_, rows, shape_.width);
      Settle();
      Store(positiveGrad_, first, query, rows);
    }
  }

  template <bool byRow>
  __aicore__ inline void Finish(const Task& task) {
    const Unit& unit = task.unit;
    const Kept& kept = kept_[task.set];
    const int32_t step = RowsAtOnce();
    for (int32_t row = 0; row < unit.count; row += step) {
      const int32_t rows = Lesser(step, unit.count - row);
      const int32_t sums = task.set * tiling_.sums + row * shape_.width;
      if constexpr (byRow) {
        if (tiling_.wantsQuery) {
          FinishQuery(unit, row, rows, sums, kept);
        }
      } else {
        FinishNegative(unit, row, rows, sums, kept);
      }
    }
  }

  __aicore__ inline void FinishQuery(const Unit& unit, int32_t row, int32_t rows, int32_t sums, const Kept& kept) {
    const LocalTensor<float> result = wide_;
    const int64_t place = static_cast<int64_t>(unit.first + row) * shape_.width;
    LoadWide(inQueue_, result, positive_[place], rows * shape_.width);
    Spread(blocks_, kept.own[row], rows);
    Settle();
    MultiplyRows(result, blocks_, rows, shape_.width);
    Settle();
    if (unit.otherCount > 0) {
      LocalTensor<float> x = LoadSums(sums, rows);
      Spread(blocks_, kept.factor[row], rows);
      Settle();
      MultiplyRows(x, blocks_, rows, shape_.width);
      Settle();
      Add(result, result, x, rows * shape_.width);
      Settle();
      inQueue_.FreeTensor(x);
    }
    Store(queryGrad_, unit.first + row, result, rows);
  }

  __aicore__ inline void FinishNegative(const Unit& unit, int32_t row, int32_t rows, int32_t sums, const Kept& kept) {
    const LocalTensor<float> result = wide_;
    if (unit.otherCount > 0) {
      LocalTensor<float> x = LoadSums(sums, rows);
      Muls(result, x, kept.scale, rows * shape_.width);
      inQueue_.FreeTensor(x);
    } else {
      Duplicate(result, 0.0f, rows * shape_.width);
    }
    Settle();
    Store(negativeGrad_, unit.first + row, result, rows);
  }

  // --- rows ------------------------------------------------------------------------------------------

  __aicore__ inline LocalTensor<float> LoadSums(int32_t first, int32_t rows) {
    LocalTensor<float> x = inQueue_.template AllocTensor<float>();
    DataCopy(x, sums_[first], rows * shape_.width);
    inQueue_.EnQue(x);
    return inQueue_.template DeQue<float>();
  }

  __aicore__ inline void Store(const GlobalTensor<T>& to, int32_t first, const LocalTensor<float>& wide, int32_t rows) {
    LocalTensor<T> out = outQueue_.template AllocTensor<T>();
    Narrowed(out, wide, rows * shape_.width);
    outQueue_.EnQue(out);
    out = outQueue_.template DeQue<T>();
    DataCopy(to[static_cast<int64_t>(first) * shape_.width], out, rows * shape_.width);
    outQueue_.FreeTensor(out);
  }

  TPipe* pipe_;
  SampledSoftmaxBackwardTiling tiling_;
  SampledShape shape_;
  SampledSweep sweep_;
  Side rows_, negatives_;
  GlobalTensor<T> positive_, queryGrad_, positiveGrad_, negativeGrad_, shares_;
  GlobalTensor<float> grad_, logSum_, scales_, slots_, sums_;
  Tasks<Index> tasks_;
  HitMask hits_;
  InQueue inQueue_, rowQueue_, columnQueue_;
  TQue<TPosition::VECOUT, 1> outQueue_;
  TBuf<TPosition::VECCALC> wideBuffer_, stateBuffer_;
  LocalTensor<float> wide_, bias_, biasBlocks_, blocks_;
  LocalTensor<float> columnBias_, columnWeight_;
  Kept kept_[2];
  float scale_;  // of the group
  float lift_;   // of gradients of the loss, in the sweep of negatives
};

}  // namespace turbogr
