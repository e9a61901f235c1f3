// Layer norm of rows, times a gate: result = ((x - mean) · rstd · weight + bias) · gate.
//
// A tile of rows stays in the unified buffer as floats, so that deviations are squared after the mean is known. Rows
// that are too wide for one instruction are worked on in blocks of columns.
#pragma once

#include "kernel_operator.h"
#include "norm_gate_tiling_data.h"
#include "row_norm_panel.h"

namespace turbogr {

// T is the dtype of x, V that of weight and bias.
template <typename T, typename V>
class NormGateKernel {
 public:
  __aicore__ inline NormGateKernel(AscendC::TPipe* pipe, const NormGateTiling& tiling) : pipe_(pipe), t_(tiling) {}

  __aicore__ inline void Init(GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR bias, GM_ADDR result, GM_ADDR mean,
                              GM_ADDR rstd) {
    using namespace row_norm;
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x));
    gate_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gate));
    result_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(result));
    mean_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(mean));
    rstd_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(rstd));

    slots_ = RoundUp(t_.tileRows, kBlock);
    pipe_->InitBuffer(xQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(gateQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(resultQueue_, 2, t_.bufferBytes);
    pipe_->InitBuffer(statQueue_, 2, 2 * slots_ * sizeof(float));
    pipe_->InitBuffer(wide_, t_.tileRows * RoundUp(t_.width, 16) * sizeof(float));
    pipe_->InitBuffer(scratch_, t_.tileRows * t_.blockColumns * sizeof(float));
    pipe_->InitBuffer(spread_, slots_ * kBlock * sizeof(float));
    pipe_->InitBuffer(scalars_, 3 * slots_ * sizeof(float));
    AscendC::Duplicate(Sums(), 0.0f, slots_);  // of rows that a tile lacks as well
    AscendC::Duplicate(Ones(), 1.0f, slots_);
    if (t_.hasWeight) Keep(weightBuffer_, weight);
    if (t_.hasBias) Keep(biasBuffer_, bias);
    Step();
  }

  __aicore__ inline void Run() {
    const row_norm::Share mine = row_norm::ShareOf(t_.rows);
    for (int64_t row = mine.begin; row < mine.end; row += t_.tileRows) {
      Tile(row, row_norm::Least(t_.tileRows, mine.end - row));
    }
  }

 private:
  using Floats = row_norm::Floats;
  using Panel = row_norm::Panel;
  using Binary = row_norm::Binary;
  template <typename U>
  using Local = AscendC::LocalTensor<U>;

  __aicore__ inline Floats Sums() { return scalars_.Get<float>(); }
  __aicore__ inline Floats Spare() { return scalars_.Get<float>()[slots_]; }
  __aicore__ inline Floats Ones() { return scalars_.Get<float>()[2 * slots_]; }
  __aicore__ inline Floats Wide(int32_t column) { return wide_.Get<float>()[t_.tileRows * column]; }

  // A vector of weights as floats, by way of the gate's buffers.
  __aicore__ inline void Keep(AscendC::TBuf<AscendC::TPosition::VECCALC>& buffer, GM_ADDR vector) {
    using namespace row_norm;
    pipe_->InitBuffer(buffer, RoundUp(t_.width, 16) * sizeof(float));
    const Floats kept = buffer.Get<float>();
    AscendC::GlobalTensor<V> from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(vector));
    AscendC::Duplicate(kept, 0.0f, RoundUp(t_.width, 16));
    Step();
    const int32_t piece = t_.bufferBytes / sizeof(V) / 16 * 16;
    for (int32_t column = 0; column < t_.width; column += piece) {
      const Panel panel = PanelOf<V>(1, Least(piece, t_.width - column));
      Local<V> staged = gateQueue_.template AllocTensor<V>();
      Load(staged, from[column], panel, panel.columns);
      gateQueue_.EnQue(staged);
      staged = gateQueue_.template DeQue<V>();
      ToFloat(kept[column], staged, panel.pitch);
      gateQueue_.FreeTensor(staged);
    }
  }

  __aicore__ inline Panel Block(int32_t rows, int32_t column) {
    return row_norm::PanelOf<T>(rows, row_norm::Least(t_.blockColumns, t_.width - column));
  }

  __aicore__ inline void Fetch(AscendC::TQue<AscendC::TPosition::VECIN, 1>& queue,
                               const AscendC::GlobalTensor<T>& from, const Panel& panel) {
    Local<T> tensor = queue.template AllocTensor<T>();
    row_norm::Load(tensor, from, panel, t_.width);
    queue.EnQue(tensor);
  }

  __aicore__ inline void Tile(int64_t row, int32_t rows) {
    const int64_t first = row * t_.width;
    for (int32_t column = 0; column < t_.width; column += t_.blockColumns) {
      const Panel panel = Block(rows, column);
      Fetch(xQueue_, x_[first + column], panel);
      if (column == 0) Fetch(gateQueue_, gate_[first], panel);
      AddUp(column, panel);
    }
    Floats stats = statQueue_.template AllocTensor<float>();
    Mean(stats, rows);
    for (int32_t column = 0; column < t_.width; column += t_.blockColumns) Deviate(column, Block(rows, column));
    Deviation(stats[slots_], rows);
    statQueue_.EnQue(stats);
    StoreStats(row, rows);
    for (int32_t column = 0; column < t_.width; column += t_.blockColumns) {
      const Panel panel = Block(rows, column);
      if (column > 0) Fetch(gateQueue_, gate_[first + column], panel);
      Finish(result_[first + column], column, panel);
    }
  }

  __aicore__ inline void AddUp(int32_t column, const Panel& panel) {
    Local<T> x = xQueue_.template DeQue<T>();
    row_norm::ToFloat(Wide(column), x, panel.Count());
    xQueue_.FreeTensor(x);
    row_norm::Step();
    row_norm::RowSums(Sums(), Spare(), Wide(column), scratch_.Get<float>(), panel, column > 0);
  }

  __aicore__ inline void Mean(const Floats& mean, int32_t rows) {
    AscendC::Muls(mean, Sums(), t_.inverseWidth, row_norm::RoundUp(rows, row_norm::kBlock));
    row_norm::Step();
    row_norm::Spread(spread_.Get<float>(), mean, rows);
    row_norm::Step();
  }

  __aicore__ inline void Deviate(int32_t column, const Panel& panel) {
    const Floats x = Wide(column), squares = scratch_.Get<float>();
    row_norm::WithRows<Binary::kSub>(x, x, spread_.Get<float>(), panel);
    row_norm::Step();
    AscendC::Mul(squares, x, x, panel.Count());
    row_norm::Step();
    row_norm::RowSums(Sums(), Spare(), squares, squares, panel, column > 0);
  }

  // Rsqrt is no more than an approximation.
  __aicore__ inline void Deviation(const Floats& rstd, int32_t rows) {
    const int32_t count = row_norm::RoundUp(rows, row_norm::kBlock);
    AscendC::Muls(Sums(), Sums(), t_.inverseWidth, count);
    row_norm::Step();
    AscendC::Adds(Sums(), Sums(), t_.eps, count);
    row_norm::Step();
    AscendC::Sqrt(Sums(), Sums(), count);
    row_norm::Step();
    AscendC::Div(rstd, Ones(), Sums(), count);
    row_norm::Step();
    row_norm::Spread(spread_.Get<float>(), rstd, rows);
  }

  __aicore__ inline void StoreStats(int64_t row, int32_t rows) {
    Floats stats = statQueue_.template DeQue<float>();
    const Panel panel = row_norm::PanelOf<float>(1, rows);
    row_norm::Store(mean_[row], stats, panel, rows);
    row_norm::Store(rstd_[row], stats[slots_], panel, rows);
    statQueue_.FreeTensor(stats);
  }

  __aicore__ inline void Finish(const AscendC::GlobalTensor<T>& to, int32_t column, const Panel& panel) {
    const Floats x = Wide(column);
    Local<T> gates = gateQueue_.template DeQue<T>();
    const Floats gate = row_norm::Widen(gates, scratch_.Get<float>(), panel.Count());
    if constexpr (!row_norm::kWide<T>) gateQueue_.FreeTensor(gates);  // the next may come
    row_norm::Step();
    row_norm::WithRows<Binary::kMul>(x, x, spread_.Get<float>(), panel);
    row_norm::Step();
    if (t_.hasWeight) {
      row_norm::WithColumns<Binary::kMul>(x, x, weightBuffer_.Get<float>()[column], panel);
      row_norm::Step();
    }
    if (t_.hasBias) {
      row_norm::WithColumns<Binary::kAdd>(x, x, biasBuffer_.Get<float>()[column], panel);
      row_norm::Step();
    }
    Local<T> result = resultQueue_.template AllocTensor<T>();
    const Floats wide = row_norm::Floating(result, x);
    AscendC::Mul(wide, x, gate, panel.Count());
    if constexpr (row_norm::kWide<T>) gateQueue_.FreeTensor(gates);
    row_norm::Narrow(result, wide, panel.Count());
    resultQueue_.EnQue(result);
    result = resultQueue_.template DeQue<T>();
    row_norm::Store(to, result, panel, t_.width);
    resultQueue_.FreeTensor(result);
  }

  AscendC::TPipe* pipe_;
  NormGateTiling t_;
  int32_t slots_;  // rows of a tile, in whole groups of eight
  AscendC::GlobalTensor<T> x_, gate_, result_;
  AscendC::GlobalTensor<float> mean_, rstd_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> xQueue_, gateQueue_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> resultQueue_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> statQueue_;  // means, then 1/deviations
  AscendC::TBuf<AscendC::TPosition::VECCALC> wide_;         // the tile as floats, block after block
  AscendC::TBuf<AscendC::TPosition::VECCALC> scratch_;      // a block as floats
  AscendC::TBuf<AscendC::TPosition::VECCALC> spread_;       // a number of each row, eight times
  AscendC::TBuf<AscendC::TPosition::VECCALC> scalars_;      // sums, what is added to them, ones
  AscendC::TBuf<AscendC::TPosition::VECCALC> weightBuffer_, biasBuffer_;
};

}  // namespace turbogr
