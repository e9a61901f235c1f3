// Gradients of norm_gate. With normal = (x - mean) · rstd and slope = grad · gate:
//
//   inner = slope · weight
//   grad of x      = (inner - mean(inner) - normal · mean(inner · normal)) · rstd       means over a row
//   grad of gate   = grad · (normal · weight + bias)
//   grad of weight = sum of slope · normal over the rows,  grad of bias = sum of slope
//
// Rows are cut into chunks that do not depend on the number of cores. Each chunk leaves its column sums in the
// workspace; when all are there, the cores share the columns and add the chunks up, always in the same order.
#pragma once

#include "kernel_operator.h"
#include "norm_gate_backward_tiling_data.h"
#include "row_norm_panel.h"

namespace turbogr {

// T is the dtype of x, V that of weight and bias.
template <typename T, typename V>
class NormGateBackwardKernel {
 public:
  __aicore__ inline NormGateBackwardKernel(AscendC::TPipe* pipe, const NormGateBackwardTiling& tiling)
      : pipe_(pipe),
        t_(tiling),
        wantsX_((tiling.wanted & kGradX) != 0),
        wantsGate_((tiling.wanted & kGradGate) != 0),
        wantsWeight_((tiling.wanted & kGradWeight) != 0),
        wantsBias_((tiling.wanted & kGradBias) != 0) {
    needsSlope_ = wantsX_ || wantsWeight_ || wantsBias_;
    needsNormal_ = wantsX_ || wantsGate_ || wantsWeight_;
    slopeIsInner_ = needsSlope_ && !t_.hasWeight;
    slots_ = row_norm::RoundUp(t_.tileRows, row_norm::kBlock);
    vector_ = row_norm::RoundUp(t_.width, 16);
    columnSums_ = (wantsWeight_ ? vector_ : 0) + (wantsBias_ ? vector_ : 0);
  }

  __aicore__ inline void Init(GM_ADDR grad, GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR bias, GM_ADDR mean,
                              GM_ADDR rstd) {
    using row_norm::kBlock;
    grad_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(grad));
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    gate_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gate));
    weight_.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(weight));
    bias_.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(bias));
    mean_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(mean));
    rstd_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(rstd));

    pipe_->InitBuffer(gradQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(xQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(gateQueue_, 2, t_.bufferBytes);
    if (wantsX_) pipe_->InitBuffer(gradXQueue_, 2, t_.bufferBytes);
    if (wantsGate_) pipe_->InitBuffer(gradGateQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(statQueue_, 1, 2 * slots_ * sizeof(float));
    if (columnSums_ > 0) pipe_->InitBuffer(sumQueue_, 1, columnSums_ * sizeof(float));
    pipe_->InitBuffer(normal_, t_.tileRows * vector_ * sizeof(float));
    pipe_->InitBuffer(inner_, t_.tileRows * vector_ * sizeof(float) + row_norm::kLanes * sizeof(float));
    if constexpr (!row_norm::kWide<T>) {
      pipe_->InitBuffer(wideGrad_, t_.tileRows * t_.blockColumns * sizeof(float));
      pipe_->InitBuffer(wideGate_, t_.tileRows * t_.blockColumns * sizeof(float));
    }
    pipe_->InitBuffer(spread_, 3 * slots_ * kBlock * sizeof(float));
    pipe_->InitBuffer(scalars_, 3 * slots_ * sizeof(float));
    pipe_->InitBuffer(affine_, 2 * Affine() * sizeof(float));
    AscendC::Duplicate(scalars_.Get<float>(), 0.0f, 3 * slots_);  // of rows that a tile lacks as well
    AscendC::Duplicate(affine_.Get<float>(), 0.0f, 2 * Affine());
    row_norm::Step();
  }

  __aicore__ inline void InitOutputs(GM_ADDR gradX, GM_ADDR gradGate, GM_ADDR gradWeight, GM_ADDR gradBias,
                                     GM_ADDR workspace) {
    gradX_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gradX));
    gradGate_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gradGate));
    gradWeight_.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(gradWeight));
    gradBias_.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(gradBias));
    partial_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(workspace));
  }

  __aicore__ inline void Run() {
    const row_norm::Share mine = row_norm::ShareOf(t_.chunks);
    for (int64_t chunk = mine.begin; chunk < mine.end; ++chunk) Chunk(chunk);
    if (columnSums_ == 0) return;
    AscendC::SyncAll();
    const int32_t groups = (t_.width + row_norm::kLanes - 1) / row_norm::kLanes;
    const row_norm::Share share = row_norm::ShareOf(groups * (columnSums_ / vector_));
    for (int64_t group = share.begin; group < share.end; ++group) {
      const bool second = group >= groups;
      const int32_t column = (group - (second ? groups : 0)) * row_norm::kLanes;
      AddChunks((wantsWeight_ && !second ? gradWeight_ : gradBias_)[column], second ? vector_ : 0, column);
    }
  }

 private:
  using Floats = row_norm::Floats;
  using Panel = row_norm::Panel;
  using Binary = row_norm::Binary;
  using Queue = AscendC::TQue<AscendC::TPosition::VECIN, 1>;
  using OutQueue = AscendC::TQue<AscendC::TPosition::VECOUT, 1>;
  using Buffer = AscendC::TBuf<AscendC::TPosition::VECCALC>;
  template <typename U>
  using Local = AscendC::LocalTensor<U>;

  __aicore__ inline int32_t Affine() const { return row_norm::RoundUp(t_.blockColumns, 16); }
  __aicore__ inline Floats Weight() { return affine_.Get<float>(); }
  __aicore__ inline Floats Bias() { return affine_.Get<float>()[Affine()]; }
  __aicore__ inline Floats Normal(int32_t column) { return normal_.Get<float>()[t_.tileRows * column]; }
  __aicore__ inline Floats Inner(int32_t column) { return inner_.Get<float>()[t_.tileRows * column]; }
  // Sums of inner and of inner · normal; what is added to either.
  __aicore__ inline Floats InnerSums() { return scalars_.Get<float>(); }
  __aicore__ inline Floats ProductSums() { return scalars_.Get<float>()[slots_]; }
  __aicore__ inline Floats Spare() { return scalars_.Get<float>()[2 * slots_]; }
  // Numbers of each row, eight times. The mean of x is not needed any more when that of inner is known.
  __aicore__ inline Floats Shift() { return spread_.Get<float>(); }
  __aicore__ inline Floats Rstd() { return spread_.Get<float>()[slots_ * row_norm::kBlock]; }
  __aicore__ inline Floats Slant() { return spread_.Get<float>()[2 * slots_ * row_norm::kBlock]; }

  __aicore__ inline Panel Block(int32_t rows, int32_t column) {
    return row_norm::PanelOf<T>(rows, row_norm::Least(t_.blockColumns, t_.width - column));
  }

  // --- rows ----------------------------------------------------------------------------------------------------------

  __aicore__ inline void Chunk(int64_t chunk) {
    Floats sums;
    if (columnSums_ > 0) {
      sums = sumQueue_.template AllocTensor<float>();
      AscendC::Duplicate(sums, 0.0f, columnSums_);
      row_norm::Step();
    }
    const int64_t end = row_norm::Least((chunk + 1) * t_.chunkRows, t_.rows);
    for (int64_t row = chunk * t_.chunkRows; row < end; row += t_.tileRows) {
      Tile(row, row_norm::Least(t_.tileRows, end - row), sums);
    }
    if (columnSums_ > 0) {
      sumQueue_.EnQue(sums);
      sums = sumQueue_.template DeQue<float>();
      AscendC::DataCopy(partial_[chunk * columnSums_], sums, columnSums_);
      sumQueue_.FreeTensor(sums);
    }
  }

  __aicore__ inline void Tile(int64_t row, int32_t rows, const Floats& sums) {
    LoadStats(row, rows);
    for (int32_t column = 0; column < t_.width; column += t_.blockColumns) {
      const Panel panel = Block(rows, column);
      LoadAffine(column, panel.columns);
      const int64_t at = row * t_.width + column;
      Fetch(gradQueue_, grad_[at], panel);
      if (needsNormal_) Fetch(xQueue_, x_[at], panel);
      if (needsSlope_) Fetch(gateQueue_, gate_[at], panel);
      Slopes(at, column, panel, sums);
    }
    if (!wantsX_) return;
    InnerMeans(rows);
    for (int32_t column = 0; column < t_.width; column += t_.blockColumns) {
      FinishX(row * t_.width + column, column, Block(rows, column));
    }
  }

  __aicore__ inline void Fetch(Queue& queue, const AscendC::GlobalTensor<T>& from, const Panel& panel) {
    Local<T> tensor = queue.template AllocTensor<T>();
    row_norm::Load(tensor, from, panel, t_.width);
    queue.EnQue(tensor);
  }

  __aicore__ inline void LoadStats(int64_t row, int32_t rows) {
    if (!needsNormal_) return;
    const Panel panel = row_norm::PanelOf<float>(1, rows);
    Floats stats = statQueue_.template AllocTensor<float>();
    row_norm::Load(stats, mean_[row], panel, rows);
    row_norm::Load(stats[slots_], rstd_[row], panel, rows);
    statQueue_.EnQue(stats);
    stats = statQueue_.template DeQue<float>();
    row_norm::Spread(Shift(), stats, rows);
    row_norm::Spread(Rstd(), stats[slots_], rows);
    statQueue_.FreeTensor(stats);
    row_norm::Step();
  }

  // Weight and bias of a block of columns, unless they are there from the block before.
  __aicore__ inline void LoadAffine(int32_t column, int32_t columns) {
    if (column == affineColumn_) return;
    affineColumn_ = column;
    if (t_.hasWeight && (wantsX_ || wantsGate_)) Keep(Weight(), weight_[column], columns);
    if (t_.hasBias && wantsGate_) Keep(Bias(), bias_[column], columns);
    row_norm::Step();
  }

  // A vector as floats, by way of grad's buffers.
  __aicore__ inline void Keep(const Floats& kept, const AscendC::GlobalTensor<V>& from, int32_t columns) {
    const int32_t piece = t_.bufferBytes / sizeof(V) / 16 * 16;
    for (int32_t column = 0; column < columns; column += piece) {
      const Panel panel = row_norm::PanelOf<V>(1, row_norm::Least(piece, columns - column));
      Local<V> staged = gradQueue_.template AllocTensor<V>();
      row_norm::Load(staged, from[column], panel, panel.columns);
      gradQueue_.EnQue(staged);
      staged = gradQueue_.template DeQue<V>();
      row_norm::ToFloat(kept[column], staged, panel.pitch);
      gradQueue_.FreeTensor(staged);
    }
  }

  // All that needs one block only: the gradient of the gate, sums of columns, this block's part in sums of rows.
  __aicore__ inline void Slopes(int64_t at, int32_t column, const Panel& panel, const Floats& sums) {
    Local<T> grads = gradQueue_.template DeQue<T>();
    Local<T> gates;
    const Floats grad = Widened(grads, wideGrad_, panel);
    const Floats normal = Normal(column);
    Floats gate;
    if (needsSlope_) {
      gates = gateQueue_.template DeQue<T>();
      gate = Widened(gates, wideGate_, panel);
    }
    if (needsNormal_) {
      Local<T> x = xQueue_.template DeQue<T>();
      row_norm::ToFloat(normal, x, panel.Count());
      xQueue_.FreeTensor(x);
    }
    if constexpr (!row_norm::kWide<T>) Free(grads, gates);  // the next may come
    row_norm::Step();

    // Without a weight, slope is inner, and goes to its place at once.
    const Floats slope = slopeIsInner_ ? Inner(column) : gate;
    const Floats room = slopeIsInner_ ? gate : Inner(column);
    if (needsSlope_) AscendC::Mul(slope, grad, gate, panel.Count());
    if (needsNormal_) {
      row_norm::WithRows<Binary::kSub>(normal, normal, Shift(), panel);
      row_norm::Step();
      row_norm::WithRows<Binary::kMul>(normal, normal, Rstd(), panel);
    }
    row_norm::Step();
    if (wantsGate_) FinishGate(at, panel, grad, normal, room);
    if (wantsBias_) row_norm::AddColumnSums(sums[(wantsWeight_ ? vector_ : 0) + column], slope, room, panel);
    const Floats product = grad;  // slope · normal; grad itself is not needed any more
    if (wantsX_ || wantsWeight_) {
      AscendC::Mul(product, slope, normal, panel.Count());
      if (wantsX_ && t_.hasWeight) row_norm::WithColumns<Binary::kMul>(Inner(column), slope, Weight(), panel);
      row_norm::Step();
    }
    if (wantsX_ && t_.hasWeight) {
      row_norm::WithColumns<Binary::kMul>(slope, product, Weight(), panel);  // inner · normal, where slope was
      row_norm::Step();
    }
    if (wantsWeight_) row_norm::AddColumnSums(sums[column], product, product, panel);
    if (wantsX_) {
      const Floats last = t_.hasWeight ? slope : product;  // inner · normal
      const Floats scratch = t_.hasWeight ? product : room;
      row_norm::RowSums(InnerSums(), Spare(), Inner(column), scratch, panel, column > 0);
      row_norm::RowSums(ProductSums(), Spare(), last, last, panel, column > 0);
    }
    if constexpr (row_norm::kWide<T>) Free(grads, gates);
  }

  __aicore__ inline Floats Widened(const Local<T>& from, Buffer& room, const Panel& panel) {
    if constexpr (row_norm::kWide<T>) {
      return from;
    } else {
      return row_norm::Widen(from, room.template Get<float>(), panel.Count());
    }
  }

  __aicore__ inline void Free(Local<T>& grads, Local<T>& gates) {
    gradQueue_.FreeTensor(grads);
    if (needsSlope_) gateQueue_.FreeTensor(gates);
  }

  __aicore__ inline void FinishGate(int64_t at, const Panel& panel, const Floats& grad, const Floats& normal,
                                    const Floats& room) {
    Floats affine = normal;
    if (t_.hasWeight) {
      row_norm::WithColumns<Binary::kMul>(room, affine, Weight(), panel);
      row_norm::Step();
      affine = room;
    }
    if (t_.hasBias) {
      row_norm::WithColumns<Binary::kAdd>(room, affine, Bias(), panel);
      row_norm::Step();
      affine = room;
    }
    Local<T> result = gradGateQueue_.template AllocTensor<T>();
    const Floats wide = row_norm::Floating(result, room);
    AscendC::Mul(wide, grad, affine, panel.Count());
    row_norm::Narrow(result, wide, panel.Count());
    Send(gradGateQueue_, gradGate_[at], result, panel);
  }

  __aicore__ inline void InnerMeans(int32_t rows) {
    const int32_t count = row_norm::RoundUp(rows, row_norm::kBlock);
    AscendC::Muls(InnerSums(), InnerSums(), t_.inverseWidth, count);
    AscendC::Muls(ProductSums(), ProductSums(), t_.inverseWidth, count);
    row_norm::Step();
    row_norm::Spread(Shift(), InnerSums(), rows);
    row_norm::Spread(Slant(), ProductSums(), rows);
    row_norm::Step();
  }

  __aicore__ inline void FinishX(int64_t at, int32_t column, const Panel& panel) {
    const Floats normal = Normal(column), inner = Inner(column);
    row_norm::WithRows<Binary::kMul>(normal, normal, Slant(), panel);
    row_norm::WithRows<Binary::kSub>(inner, inner, Shift(), panel);
    row_norm::Step();
    AscendC::Sub(inner, inner, normal, panel.Count());
    row_norm::Step();
    Local<T> result = gradXQueue_.template AllocTensor<T>();
    const Floats wide = row_norm::Floating(result, inner);
    row_norm::WithRows<Binary::kMul>(wide, inner, Rstd(), panel);
    row_norm::Narrow(result, wide, panel.Count());
    Send(gradXQueue_, gradX_[at], result, panel);
  }

  __aicore__ inline void Send(OutQueue& queue, const AscendC::GlobalTensor<T>& to, Local<T>& tensor,
                              const Panel& panel) {
    queue.EnQue(tensor);
    tensor = queue.template DeQue<T>();
    row_norm::Store(to, tensor, panel, t_.width);
    queue.FreeTensor(tensor);
  }

  // --- columns -------------------------------------------------------------------------------------------------------

  // Sums of up to 64 columns over all chunks; `offset` is where their vector begins in the sums of a chunk.
  __aicore__ inline void AddChunks(const AscendC::GlobalTensor<V>& to, int32_t offset, int32_t column) {
    const int32_t columns = row_norm::Least(row_norm::kLanes, t_.width - column);
    const int32_t pitch = row_norm::RoundUp(columns, 16);
    const int32_t most = t_.bufferBytes / (pitch * sizeof(float));
    const Floats total = inner_.Get<float>();
    AscendC::Duplicate(total, 0.0f, pitch);
    row_norm::Step();
    for (int64_t chunk = 0; chunk < t_.chunks; chunk += most) {
      const int32_t rows = row_norm::Least(most, t_.chunks - chunk);
      const Panel panel = {rows, pitch, pitch};
      Floats partial = gradQueue_.template AllocTensor<float>();
      row_norm::Load(partial, partial_[chunk * columnSums_ + offset + column], panel, columnSums_);
      gradQueue_.EnQue(partial);
      partial = gradQueue_.template DeQue<float>();
      row_norm::AddColumnSums(total, partial, partial, panel);
      gradQueue_.FreeTensor(partial);
    }
    Local<V> result = sumQueue_.template AllocTensor<V>();
    row_norm::FromFloat(result, total, pitch);
    sumQueue_.EnQue(result);
    result = sumQueue_.template DeQue<V>();
    row_norm::Store(to, result, row_norm::PanelOf<V>(1, columns), columns);
    sumQueue_.FreeTensor(result);
  }

  AscendC::TPipe* pipe_;
  NormGateBackwardTiling t_;
  bool wantsX_, wantsGate_, wantsWeight_, wantsBias_;
  bool needsSlope_, needsNormal_, slopeIsInner_;
  int32_t slots_;              // rows of a tile, in whole groups of eight
  int32_t vector_;             // columns, in whole groups of sixteen
  int32_t columnSums_;         // floats that a chunk leaves: for weight, for bias
  int32_t affineColumn_ = -1;  // first column of the weights at hand
  AscendC::GlobalTensor<T> grad_, x_, gate_, gradX_, gradGate_;
  AscendC::GlobalTensor<V> weight_, bias_, gradWeight_, gradBias_;
  AscendC::GlobalTensor<float> mean_, rstd_, partial_;
  Queue gradQueue_, xQueue_, gateQueue_, statQueue_;
  OutQueue gradXQueue_, gradGateQueue_, sumQueue_;
  Buffer normal_, inner_;        // the tile, block after block
  Buffer wideGrad_, wideGate_;   // a block as floats
  Buffer spread_, scalars_;      // numbers of each row: eight times, and once
  Buffer affine_;                // weight and bias of a block
};

}  // namespace turbogr
