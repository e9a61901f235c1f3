// Sampled softmax over jagged groups: loss and log-sum-exp of each row's positive and its group's negatives.
//
// A block of rows meets the negatives of its group tile by tile. The cube writes a tile of logits to one of two slots
// of the workspace while the vector core folds the one before into each row's largest logit and sum of exponentials.
// Both begin with the positive, whose logit is a product of two rows on the vector core: so there is always something
// to subtract, and nothing overflows.
#pragma once

#include "sampled_softmax_common.h"
#include "sampled_softmax_tiling_data.h"

namespace turbogr {

template <typename T, typename Index>
class SampledSoftmaxKernel {
 public:
  using Plain = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T>;
  using Turned = matmul::MatmulType<TPosition::GM, CubeFormat::ND, T, true>;
  using Wide = matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>;

  matmul::Matmul<Plain, Turned, Wide> logits;

  __aicore__ inline SampledSoftmaxKernel(TPipe* pipe, const SampledSoftmaxTiling& tiling)
      : pipe_(pipe), shape_(tiling.shape), sweep_(tiling.sweep) {}

  __aicore__ inline void Init(GM_ADDR query, GM_ADDR positive, GM_ADDR negative, GM_ADDR queryOffsets,
                              GM_ADDR negativeOffsets, GM_ADDR positiveIds, GM_ADDR negativeIds, GM_ADDR negativeScales,
                              GM_ADDR loss, GM_ADDR logSum, GM_ADDR workspace) {
    const int64_t rows = shape_.rows, negatives = shape_.negatives, width = shape_.width, groups = shape_.groups;
    query_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(query), rows * width);
    positive_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(positive), rows * width);
    negative_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(negative), negatives * width);
    queryOffsets_.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(queryOffsets), groups + 1);
    negativeOffsets_.SetGlobalBuffer(reinterpret_cast<__gm__ Index*>(negativeOffsets), groups + 1);
    positiveIds_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(positiveIds), rows);
    negativeIds_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(negativeIds), negatives);
    scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(negativeScales), groups);
    loss_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(loss), rows);
    logSum_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(logSum), rows);
    GM_ADDR own = workspace + GetBlockIdx() * shape_.coreBytes;
    slots_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(own), 2 * sweep_.slot);
    InitBuffers();
  }

  __aicore__ inline void Run() {
    WriteZeros(loss_, 0, queryOffsets_.GetValue(0), outQueue_, outBytes_);
    WriteZeros(loss_, queryOffsets_.GetValue(shape_.groups), shape_.rows, outQueue_, outBytes_);
    WriteZeros(logSum_, 0, queryOffsets_.GetValue(0), outQueue_, outBytes_);
    WriteZeros(logSum_, queryOffsets_.GetValue(shape_.groups), shape_.rows, outQueue_, outBytes_);
    tasks_.Start(queryOffsets_, negativeOffsets_, sweep_, true);
    logits.SetOrgShape(sweep_.block, sweep_.tile, shape_.width);
    Task now, next;
    bool some = tasks_.Next(&now);
    if (some) {
      Issue(now);
    }
    while (some) {
      if (now.head) {
        Begin(now.unit);
      }
      const bool more = tasks_.Next(&next);
      if (now.columns > 0) {
        logits.WaitIterateAll();
        logits.End();
      }
      if (more) {
        Issue(next);
      }
      Fold(now);
      if (now.last) {
        Finish(now.unit);
      }
      now = next;
      some = more;
    }
  }

 private:
  static constexpr int32_t kRows = kStripElements / kStrip;  // of a strip

  __aicore__ inline void InitBuffers() {
    const int32_t block = sweep_.block;
    outBytes_ = 2 * block * sizeof(float);
    tasks_.Init(pipe_, shape_.groups);
    pipe_->InitBuffer(inQueue_, 2, kStripElements * sizeof(float));
    pipe_->InitBuffer(outQueue_, 2, outBytes_);
    pipe_->InitBuffer(wideBuffer_, 2 * kWideElements * sizeof(float));
    pipe_->InitBuffer(stateBuffer_, (3 * block + (3 + kBlockFloats) * kRows) * sizeof(float));
    wide_ = wideBuffer_.Get<float>();
    own_ = stateBuffer_.Get<float>();
    Duplicate(own_, 0.0f, 3 * block + (3 + kBlockFloats) * kRows);
    Settle();
    top_ = own_[block];
    sum_ = top_[block];
    peak_ = sum_[block];
    decay_ = peak_[kRows];
    part_ = decay_[kRows];
    peakBlocks_ = part_[kRows];
    if (shape_.hasIds) {
      hits_.Init(pipe_, block, sweep_.tile, kStripElements);
    }
  }

  // Has the cube compute a tile. The slot may still be under way to the unified buffer.
  __aicore__ inline void Issue(const Task& task) {
    if (task.columns == 0) {
      return;
    }
    Await<HardEvent::MTE2_MTE3>(pipe_);
    logits.SetSingleShape(task.unit.count, task.columns, shape_.width);
    logits.SetTensorA(query_[static_cast<int64_t>(task.unit.first) * shape_.width]);
    logits.SetTensorB(negative_[static_cast<int64_t>(task.unit.otherFirst + task.column) * shape_.width], true);
    logits.template IterateAll<false>(slots_[task.slot * sweep_.slot], 0, false, true);
  }

  // Logits of the positives; the largest so far, with a sum of one.
  __aicore__ inline void Begin(const Unit& unit) {
    const int32_t step = Lesser(sweep_.block, kWideElements / shape_.width / 8 * 8);
    const LocalTensor<float> left = wide_, right = wide_[kWideElements];
    for (int32_t row = 0; row < unit.count; row += step) {
      const int32_t rows = Lesser(step, unit.count - row);
      const int64_t first = static_cast<int64_t>(unit.first + row) * shape_.width;
      LoadWide(inQueue_, left, query_[first], rows * shape_.width);
      LoadWide(inQueue_, right, positive_[first], rows * shape_.width);
      Settle();
      Mul(left, left, right, rows * shape_.width);
      Settle();
      ReduceRows<true>(own_[row], left, right, rows, shape_.width);
      Settle();
    }
    const int32_t rows = RoundedUp(unit.count, 8);
    Muls(own_, own_, shape_.scale, rows);
    Duplicate(sum_, 1.0f, rows);
    Settle();
    Adds(top_, own_, 0.0f, rows);
    Settle();
    if (shape_.hasIds && unit.otherCount > 0) {
      hits_.LoadRows(positiveIds_[unit.first], unit.count);
    }
    scale_ = shape_.hasScales ? shape_.scale * scales_.GetValue(unit.group) : shape_.scale;
  }

  __aicore__ inline void Fold(const Task& task) {
    if (task.columns == 0) {
      return;
    }
    if (shape_.hasIds) {
      hits_.LoadColumns(negativeIds_[task.unit.otherFirst + task.column], task.columns);
    }
    const int32_t step = EvenPart(task.unit.count, kRows);
    for (int32_t column = 0; column < task.columns; column += kStrip) {
      for (int32_t row = 0; row < task.unit.count; row += step) {
        FoldStrip(task, row, Lesser(step, task.unit.count - row), column, Lesser(kStrip, task.columns - column));
      }
    }
    if (shape_.hasIds) {
      hits_.FreeColumns();
    }
  }

  __aicore__ inline void FoldStrip(const Task& task, int32_t row, int32_t rows, int32_t column, int32_t columns) {
    const int32_t pitch = RoundedUp(columns, kLanes), numbers = RoundedUp(rows, 8);
    const GlobalTensor<float> logits = slots_[task.slot * sweep_.slot + row * sweep_.tile + column];
    LocalTensor<float> x = LoadStrip(inQueue_, logits, rows, columns, pitch, sweep_.tile);
    for (int32_t c = 0; c < columns; c += kLanes) {
      Muls(x[c], x[c], scale_, Lesser(kLanes, columns - c), rows, RowStrides(pitch, pitch));
    }
    Settle();
    if (columns < pitch) {
      FillLanes(x[pitch - kLanes], kLowest, columns % kLanes, rows, pitch);
      Settle();
    }
    if (shape_.hasIds) {
      hits_.Drop(x, row, rows, column, columns, pitch);
    }
    ReduceRows<false>(peak_, x, wide_, rows, pitch);
    Settle();
    Max(peak_, peak_, top_[row], numbers);
    Settle();
    Sub(decay_, top_[row], peak_, numbers);
    Spread(peakBlocks_, peak_, rows);
    Settle();
    Exp(decay_, decay_, numbers);
    Adds(top_[row], peak_, 0.0f, numbers);
    for (int32_t c = 0; c < pitch; c += kLanes) {
      Sub(x[c], x[c], peakBlocks_, kLanes, rows, ByRow(pitch));
    }
    Settle();
    Mul(sum_[row], sum_[row], decay_, numbers);
    Exp(x, x, rows * pitch);
    Settle();
    ReduceRows<true>(part_, x, wide_, rows, pitch);
    Settle();
    Add(sum_[row], sum_[row], part_, numbers);
    Settle();
    inQueue_.FreeTensor(x);
  }

  // loss = (top - own) + ln(sum): small ones keep what log_sum - own would lose.
  __aicore__ inline void Finish(const Unit& unit) {
    const int32_t block = sweep_.block, rows = RoundedUp(unit.count, 8);
    LocalTensor<float> out = outQueue_.template AllocTensor<float>();
    Ln(sum_, sum_, rows);
    Sub(own_, top_, own_, rows);
    Settle();
    Add(out, own_, sum_, rows);
    Add(out[block], top_, sum_, rows);
    outQueue_.EnQue(out);
    out = outQueue_.template DeQue<float>();
    const DataCopyExtParams copy{1, static_cast<uint32_t>(unit.count * sizeof(float)), 0, 0, 0};
    DataCopyPad(loss_[unit.first], out, copy);
    DataCopyPad(logSum_[unit.first], out[block], copy);
    outQueue_.FreeTensor(out);
  }

  TPipe* pipe_;
  SampledShape shape_;
  SampledSweep sweep_;
  GlobalTensor<T> query_, positive_, negative_;
  GlobalTensor<Index> queryOffsets_, negativeOffsets_;
  GlobalTensor<int32_t> positiveIds_, negativeIds_;
  GlobalTensor<float> scales_, loss_, logSum_, slots_;
  Tasks<Index> tasks_;
  HitMask hits_;
  InQueue inQueue_;
  TQue<TPosition::VECOUT, 1> outQueue_;
  TBuf<TPosition::VECCALC> wideBuffer_, stateBuffer_;
  LocalTensor<float> wide_;
  LocalTensor<float> own_, top_, sum_;       // of the rows of a block: positive, largest so far, sum so far
  LocalTensor<float> peak_, decay_, part_;   // of the rows of a strip
  LocalTensor<float> peakBlocks_;
  int32_t outBytes_;
  float scale_;  // of the group
};

}  // namespace turbogr
