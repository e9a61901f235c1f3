// Dense tables of pairs, table[sequence, head, query column, key column]: a bias of scores, and a mask that hides them.
//
// Rows of a table lie side by side where neither queries nor keys leave columns out. Else they are loaded one by one,
// or from the first key of the tile on, and Gather picks keys from them.
#pragma once

#include "attention_bias.h"
#include "attention_step.h"

namespace turbogr {

template <typename Index>
class PairTables {
 public:
  __aicore__ inline void Init(TPipe* pipe, const AttentionShape& shape, const GlobalTensor<float>& bias,
                              const GlobalTensor<uint8_t>& mask) {
    shape_ = shape;
    biases_ = bias;
    masks_ = mask;
    if (!Any()) return;
    pipe->InitBuffer(gaps_, 2 * kKeyBlock * sizeof(int32_t));
    if (HasBias()) pipe->InitBuffer(bias_, 1, shape.slab * sizeof(float));
    if (HasMask()) {
      pipe->InitBuffer(mask_, 1, shape.slab);
      pipe->InitBuffer(bits_, shape.slab / 8);
    }
  }

  __aicore__ inline bool HasBias() const { return shape_.bias.columns > 0; }
  __aicore__ inline bool HasMask() const { return shape_.mask.columns > 0; }
  __aicore__ inline bool Any() const { return HasBias() || HasMask(); }

  // Begins a tile. `keys` are columns as the vector unit wants them, the others as the scalar unit does.
  __aicore__ inline void Prepare(const Step& step, const LocalTensor<Index>& keyColumns,
                                 const LocalTensor<Index>& queryColumns, const LocalTensor<int32_t>& keys) {
    step_ = step;
    keyColumns_ = keyColumns;
    queryColumns_ = queryColumns;
    // Bytes from the first key on, in rows of floats and of halves.
    auto floats = gaps_.Get<int32_t>();
    auto halves = floats[kKeyBlock];
    const int32_t count = RoundUp(step.keys, kColumnUnit);
    Adds(floats, keys, -step.column, count);
    PipeBarrier<PIPE_V>();
    Muls(halves, floats, 2, count);
    PipeBarrier<PIPE_V>();
    Muls(floats, floats, 4, count);
    PipeBarrier<PIPE_V>();
  }

  // Adds biases to scores, or takes them away where scores come with the other sign.
  __aicore__ inline void AddBias(const LocalTensor<float>& scores, const Slab& slab, bool negative,
                                 const LocalTensor<float>& scratch) {
    const Span span = SpanOf(slab);
    const int32_t pitch = span.holes ? RoundUp(span.columns, kColumnUnit) : slab.width;
    const bool same = shape_.bias.query == 0;  // one row stands for all
    const int32_t most = same ? slab.rows : Smaller(slab.rows, shape_.slab / pitch);
    for (int32_t row = 0; row < slab.rows; row += most) {
      const int32_t rows = Smaller(most, slab.rows - row);
      auto found = Load(bias_, biases_, shape_.bias, span, slab.row + row, same ? 1 : rows, pitch);
      auto to = scores[row * slab.width];
      if (span.holes) {
        for (int32_t r = 0; r < (same ? 1 : rows); ++r) {
          Gather(scratch[r * slab.width], found[r * pitch], gaps_.Get<uint32_t>()[slab.low], 0U,
                 static_cast<uint32_t>(slab.width));
        }
        PipeBarrier<PIPE_V>();
      }
      const auto bias = span.holes ? scratch : found;
      if (same) {
        ApplyRow(to, bias, rows, slab.width, negative);
      } else {
        Apply(to, bias, rows * slab.width, negative);
      }
      bias_.FreeTensor(found);
    }
  }

  // scores[r, c] = value where the mask hides the pair, whatever the score was.
  __aicore__ inline void Hide(const LocalTensor<float>& scores, const Slab& slab, float value,
                              const LocalTensor<float>& scratch) {
    const Span span = SpanOf(slab);
    const int32_t pitch = RoundUp(span.columns, 32);  // a block of bytes
    const bool same = shape_.mask.query == 0;         // one row stands for all
    const int32_t most = same ? slab.rows : Smaller(slab.rows, shape_.slab / pitch);
    auto shown = scratch.template ReinterpretCast<half>(), all = shown[shape_.slab];
    auto bits = bits_.Get<uint8_t>();
    for (int32_t row = 0; row < slab.rows; row += most) {
      const int32_t rows = Smaller(most, slab.rows - row);
      const int32_t count = rows * slab.width;
      auto found = Load(mask_, masks_, shape_.mask, span, slab.row + row, same ? 1 : rows, pitch);
      if (span.holes) {
        Cast(all, found, RoundMode::CAST_NONE, (same ? 1 : rows) * pitch);
        PipeBarrier<PIPE_V>();
        for (int32_t r = 0; r < rows; ++r) {
          Gather(shown[r * slab.width], all[same ? 0 : r * pitch], gaps_.Get<uint32_t>()[kKeyBlock + slab.low], 0U,
                 static_cast<uint32_t>(slab.width));
        }
      } else {
        WidenRows(shown, found, rows, slab.width, same ? 0 : pitch);
      }
      PipeBarrier<PIPE_V>();
      mask_.FreeTensor(found);
      CompareScalar(bits, shown, static_cast<half>(0.5f), CMPMODE::GT, RoundUp(count, 2 * kLanes));
      PipeBarrier<PIPE_V>();
      Select(scores[row * slab.width], bits, scores[row * slab.width], value, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
      PipeBarrier<PIPE_V>();
    }
  }

 private:
  // Columns of a table that a slab takes: `begin` and those behind it.
  struct Span {
    int64_t begin;
    int32_t columns;
    bool holes;
  };

  __aicore__ inline Span SpanOf(const Slab& slab) const {
    const int64_t first = KeyColumn(slab.low), last = KeyColumn(slab.low + slab.columns - 1);
    const bool holes = last - first + 1 > slab.columns;
    const int64_t begin = holes ? KeyColumn(0) : first;
    return {begin, static_cast<int32_t>(last - begin + 1), holes};
  }
  __aicore__ inline int64_t KeyColumn(int32_t key) const { return static_cast<int64_t>(keyColumns_.GetValue(key)); }
  __aicore__ inline int64_t QueryColumn(int32_t row) const { return static_cast<int64_t>(queryColumns_.GetValue(row)); }

  // Rows of a table, `pitch` apart in UB.
  template <typename T>
  __aicore__ inline LocalTensor<T> Load(TQue<TPosition::VECIN, 1>& queue, const GlobalTensor<T>& table,
                                        const PairStrides& strides, const Span& span, int32_t row, int32_t rows,
                                        int32_t pitch) {
    auto to = queue.AllocTensor<T>();
    const int64_t origin = step_.sequence * strides.sequence + step_.head * strides.head + span.begin;
    const uint32_t bytes = span.columns * sizeof(T);
    const int64_t column = QueryColumn(row);
    if (QueryColumn(row + rows - 1) - column == rows - 1) {
      const uint32_t apart = static_cast<uint32_t>((strides.columns - span.columns) * sizeof(T));
      const uint32_t gap = (pitch * sizeof(T) - (bytes + 31) / 32 * 32) / 32;
      DataCopyPad(to, table[origin + column * strides.query],
                  DataCopyExtParams{static_cast<uint16_t>(rows), bytes, apart, gap, 0}, DataCopyPadExtParams<T>{});
    } else {
      for (int32_t r = 0; r < rows; ++r) {
        CopyIn(to[r * pitch], table[origin + QueryColumn(row + r) * strides.query], span.columns);
      }
    }
    queue.EnQue(to);
    return queue.template DeQue<T>();
  }

  // Rows of bytes, `pitch` apart or all the same, as halves that lie side by side.
  __aicore__ inline void WidenRows(const LocalTensor<half>& to, const LocalTensor<uint8_t>& from, int32_t rows,
                                   int32_t width, int32_t pitch) {
    const UnaryRepeatParams params{1, 1, static_cast<uint8_t>(width / 16), static_cast<uint8_t>(pitch / 32)};
    for (int32_t c = 0; c < width; c += 2 * kLanes) {
      Cast(to[c], from[c], RoundMode::CAST_NONE, static_cast<uint64_t>(Smaller(2 * kLanes, width - c)),
           static_cast<uint8_t>(rows), params);
    }
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

  __aicore__ inline void ApplyRow(const LocalTensor<float>& scores, const LocalTensor<float>& row, int32_t rows,
                                  int32_t width, bool negative) {
    const uint8_t pitch = static_cast<uint8_t>(width / 8);
    const BinaryRepeatParams params{1, 1, 1, pitch, pitch, 0};
    for (int32_t c = 0; c < width; c += kLanes) {
      const uint64_t mask = Smaller(kLanes, width - c);
      if (negative) {
        Sub(scores[c], scores[c], row[c], mask, static_cast<uint8_t>(rows), params);
      } else {
        Add(scores[c], scores[c], row[c], mask, static_cast<uint8_t>(rows), params);
      }
    }
    PipeBarrier<PIPE_V>();
  }

  AttentionShape shape_;
  GlobalTensor<float> biases_;
  GlobalTensor<uint8_t> masks_;
  TQue<TPosition::VECIN, 1> bias_, mask_;
  TBuf<TPosition::VECCALC> gaps_, bits_;
  LocalTensor<Index> keyColumns_, queryColumns_;
  Step step_;
};

}  // namespace turbogr
