// Which pairs dropout leaves: the pure function of kernels/dropout.py, bit for bit. With `mix` of attention_words.h:
//
//     row:      mix(state ^ query column)                state: of seed, sequence and head, by the scalar unit
//     bits:     mix(row ^ key column)                    a pair is dropped where they are below a limit
//
// The first shift of mix is by half a word: x ^ (x >> 16) has the high half of x, and the xor of both as its low one. So
// rows and keys are prepared for it, 128 and 256 of them for a tile, and of the first product h L is known for each row.
// What is left takes 33 instructions for 64 pairs.
#pragma once

#include "attention_step.h"
#include "attention_words.h"

namespace turbogr {

constexpr uint32_t kMixStart = 0x9e3779b9U;
constexpr int32_t kHalfWord = 1 << 16;

class PairDropout {
 public:
  __aicore__ inline void Init(TPipe* pipe, const AttentionShape& shape, const GlobalTensor<int64_t>& seed) {
    shape_ = shape;
    if (!shape.drops) return;
    const uint64_t number = static_cast<uint64_t>(seed.GetValue(0));
    seedState_ = Words::Mixed(Words::Mixed(kMixStart ^ static_cast<uint32_t>(number)) ^
                              static_cast<uint32_t>(number >> 32));
    pipe->InitBuffer(rows_, 3 * kRowBlock * 32);
    pipe->InitBuffer(keys_, 2 * kKeyBlock * sizeof(int32_t));
    pipe->InitBuffer(bits_, shape.slab / 8);
  }

  __aicore__ inline bool Drops() const { return shape_.drops != 0; }

  // Begins a tile with columns of its keys and rows, of which `last` is the largest key. `scratch` holds two times
  // kKeyBlock numbers.
  __aicore__ inline void Prepare(const Step& step, const LocalTensor<int32_t>& keys, const LocalTensor<int32_t>& rows,
                                 int64_t last, const LocalTensor<float>& scratch) {
    far_ = last >= kHalfWord;
    auto words = scratch.template ReinterpretCast<int32_t>();
    PrepareKeys(keys, RoundUp(step.keys, kColumnUnit), words);
    PrepareRows(step, rows, words);
  }

  // Bits of a slab: set for pairs that stay. `scratch` holds a slab.
  __aicore__ inline void Draw(const Slab& slab, const LocalTensor<float>& scratch) {
    const int32_t part = shape_.slab / 4;
    auto x = scratch.template ReinterpretCast<int32_t>();
    auto a = x[part], b = x[2 * part];
    const int32_t most = part / slab.width;
    for (int32_t row = 0, piece = 0; row < slab.rows; row += most, ++piece) {
      const int32_t rows = Smaller(most, slab.rows - row), count = rows * slab.width;
      Hash(slab, slab.row + row, rows, x, a, b);
      Maxs(a, x, shape_.dropLow, count);
      PipeBarrier<PIPE_V>();
      Mins(a, a, shape_.dropHigh, count);
      PipeBarrier<PIPE_V>();
      auto bits = bits_.Get<uint8_t>()[piece * part / 8];
      // Those between both limits are not changed by them.
      Compare(bits, x, a, CMPMODE::EQ, RoundUp(count, kLanes));
      PipeBarrier<PIPE_V>();
      if (shape_.dropInside) {
        auto words = bits.template ReinterpretCast<uint16_t>();
        Not(words, words, RoundUp(count, kLanes) / 16);
        PipeBarrier<PIPE_V>();
      }
    }
  }

  // x = 0 for pairs that are dropped, by the bits that were drawn last.
  __aicore__ inline void Apply(const LocalTensor<float>& x, const Slab& slab) {
    const int32_t part = shape_.slab / 4;
    const int32_t most = part / slab.width;
    for (int32_t row = 0, piece = 0; row < slab.rows; row += most, ++piece) {
      auto own = x[row * slab.width];
      Select(own, bits_.Get<uint8_t>()[piece * part / 8], own, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE,
             Smaller(most, slab.rows - row) * slab.width);
    }
    PipeBarrier<PIPE_V>();
  }

 private:
  __aicore__ inline void PrepareKeys(const LocalTensor<int32_t>& columns, int32_t count,
                                     const LocalTensor<int32_t>& scratch) {
    auto low = keys_.Get<int32_t>(), high = low[kKeyBlock];
    ShiftRight(high.ReinterpretCast<uint32_t>(), columns.ReinterpretCast<uint32_t>(), 16U, count);
    PipeBarrier<PIPE_V>();
    Words::Xor(low, columns, high, scratch, count);
    Words::ClearHigh(low, count);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void PrepareRows(const Step& step, const LocalTensor<int32_t>& columns,
                                     const LocalTensor<int32_t>& scratch) {
    auto x = scratch, a = scratch[kRowBlock], b = scratch[2 * kRowBlock];
    const uint32_t state = Words::Mixed(Words::Mixed(seedState_ ^ static_cast<uint32_t>(step.sequence)) ^
                                        static_cast<uint32_t>(step.head));
    Duplicate(a, static_cast<int32_t>(state), step.rows);
    PipeBarrier<PIPE_V>();
    Words::Xor(x, columns, a, b, step.rows);
    Words::Mix(x, a, b, step.rows);
    Words::XorShifted(x, 16, a, b, step.rows);  // `a` is the high half
    Words::ClearHigh(x, step.rows);
    Muls(b, a, kFirstFactor.low, step.rows);
    PipeBarrier<PIPE_V>();
    const uint8_t repeats = static_cast<uint8_t>((step.rows + 7) / 8);
    Brcb(Rows(kLow), x, repeats, BrcbRepeatParams{1, 8});
    Brcb(Rows(kHigh), a, repeats, BrcbRepeatParams{1, 8});
    Brcb(Rows(kTerm), b, repeats, BrcbRepeatParams{1, 8});
    PipeBarrier<PIPE_V>();
  }

  // x = bits of the pairs of some rows.
  __aicore__ inline void Hash(const Slab& slab, int32_t row, int32_t rows, const LocalTensor<int32_t>& x,
                              const LocalTensor<int32_t>& a, const LocalTensor<int32_t>& b) {
    auto keys = keys_.Get<int32_t>()[slab.low];
    const int32_t count = rows * slab.width;
    Words::XorRows(x, Rows(kLow)[row * 8], keys, b, rows, slab.width);
    if (far_) {
      // High halves of keys are not 0.
      Words::XorRows(a, Rows(kHigh)[row * 8], keys[kKeyBlock], b, rows, slab.width);
      Muls(a, a, kFirstFactor.low, count);
      PipeBarrier<PIPE_V>();
      Words::Finish(x, a, b, count);
      return;
    }
    Muls(b, x, kFirstFactor.low, count);
    Muls(x, x, kFirstFactor.high, count);
    PipeBarrier<PIPE_V>();
    const uint8_t pitch = static_cast<uint8_t>(slab.width / 8);
    for (int32_t c = 0; c < slab.width; c += kLanes) {
      Add(x[c], x[c], Rows(kTerm)[row * 8], Smaller(kLanes, slab.width - c), static_cast<uint8_t>(rows),
          BinaryRepeatParams{1, 1, 0, pitch, pitch, 1});
    }
    Words::Continue(x, a, b, count);
  }

  // One block of 32 bytes for each row: low and high halves, and what the latter come to in the first product.
  static constexpr int32_t kLow = 0, kHigh = 1, kTerm = 2;
  __aicore__ inline LocalTensor<int32_t> Rows(int32_t which) { return rows_.Get<int32_t>()[which * kRowBlock * 8]; }

  AttentionShape shape_;
  TBuf<TPosition::VECCALC> rows_, keys_, bits_;
  uint32_t seedState_ = 0;
  bool far_ = false;
};

}  // namespace turbogr
