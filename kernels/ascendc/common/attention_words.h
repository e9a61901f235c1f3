// Words of 32 bits on the vector unit, and the mix of kernels/dropout.py on them, bit for bit:
//
//     mix(x):   x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
//
// The vector unit has no xor: a ^ b = (a | b) - (a & b), which never overflows. Nothing says whether products wrap, so
// they are made of halves, and no sum or product exceeds 31 bits. With x = 2^16 h + l and M = 2^16 H + L, where L is
// signed, x M = 2^16 (l H + h L + (l L >> 16)) + (l L & 0xffff) modulo 2^32.
#pragma once

#include "attention_bias.h"

namespace turbogr {

// M = 2^16 high + low. No sum of products may exceed 31 bits: where both are positive, `high` is cut to 16 first.
struct Factor {
  int32_t high, low;

  __aicore__ constexpr uint32_t Whole() const {
    return (static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(low);
  }
};
constexpr Factor kFirstFactor{0x21f1, 0xaaad - 0x10000};
constexpr Factor kSecondFactor{0x735a, 0x2d97};
static_assert(kFirstFactor.Whole() == 0x21f0aaadU && kSecondFactor.Whole() == 0x735a2d97U, "factors of mix");

// On words of 32 bits. All buffers hold a multiple of 64 of them.
class Words {
 public:
  using Tensor = LocalTensor<int32_t>;

  __aicore__ inline static uint32_t Mixed(uint32_t x) {
    x ^= x >> 16;
    x *= kFirstFactor.Whole();
    x ^= x >> 15;
    x *= kSecondFactor.Whole();
    return x ^ (x >> 15);
  }

  // x = mix(x).
  __aicore__ inline static void Mix(const Tensor& x, const Tensor& a, const Tensor& b, int32_t count) {
    XorShifted(x, 16, a, b, count);
    Split(x, a, count);
    Muls(a, a, kFirstFactor.low, count);
    PipeBarrier<PIPE_V>();
    Finish(x, a, b, count);
  }

  // The rest of mix, where low halves are in x, and high ones times L of the first factor in `term`. It is overwritten.
  __aicore__ inline static void Finish(const Tensor& x, const Tensor& term, const Tensor& b, int32_t count) {
    Muls(b, x, kFirstFactor.low, count);
    Muls(x, x, kFirstFactor.high, count);
    PipeBarrier<PIPE_V>();
    Add(x, x, term, count);
    Continue(x, term, b, count);
  }

  // The same where x holds the sum of both products of the first factor, and `low` the product of low halves.
  __aicore__ inline static void Continue(const Tensor& x, const Tensor& a, const Tensor& low, int32_t count) {
    Join(x, low, a, count);
    XorShifted(x, 15, a, low, count);
    Split(x, a, count);
    auto product = low;
    Muls(product, x, kSecondFactor.low, count);
    Muls(a, a, kSecondFactor.low, count);
    Muls(x, x, kSecondFactor.high, count);
    PipeBarrier<PIPE_V>();
    ClearHigh(x, count);
    PipeBarrier<PIPE_V>();
    Add(x, x, a, count);
    Join(x, product, a, count);
    XorShifted(x, 15, a, product, count);
  }

  // to = a ^ b; `to` may be a.
  __aicore__ inline static void Xor(const Tensor& to, const Tensor& a, const Tensor& b, const Tensor& scratch,
                                    int32_t count) {
    Or(Halves(scratch), Halves(a), Halves(b), 2 * count);
    And(Halves(to), Halves(a), Halves(b), 2 * count);
    PipeBarrier<PIPE_V>();
    Sub(to, scratch, to, count);
    PipeBarrier<PIPE_V>();
  }

  // to[r, c] = rows[r] ^ keys[c]; rows come as one block of 32 bytes each. `width` is that of a row of `to`.
  __aicore__ inline static void XorRows(const Tensor& to, const Tensor& rows, const Tensor& keys, const Tensor& scratch,
                                        int32_t count, int32_t width) {
    const BinaryRepeatParams params{1, 0, 1, static_cast<uint8_t>(width / 8), 1, 0};
    for (int32_t c = 0; c < width; c += kLanes) {
      const uint64_t lanes = 2 * Smaller(kLanes, width - c);
      Or(Halves(scratch[c]), Halves(rows), Halves(keys[c]), lanes, static_cast<uint8_t>(count), params);
      And(Halves(to[c]), Halves(rows), Halves(keys[c]), lanes, static_cast<uint8_t>(count), params);
    }
    PipeBarrier<PIPE_V>();
    Sub(to, scratch, to, count * width);
    PipeBarrier<PIPE_V>();
  }

  // x ^= x >> bits, and `shifted` what it was shifted to.
  __aicore__ inline static void XorShifted(const Tensor& x, uint32_t bits, const Tensor& shifted, const Tensor& scratch,
                                           int32_t count) {
    ShiftRight(shifted.ReinterpretCast<uint32_t>(), x.ReinterpretCast<uint32_t>(), bits, count);
    PipeBarrier<PIPE_V>();
    Xor(x, x, shifted, scratch, count);
  }

  __aicore__ inline static void ClearHigh(const Tensor& x, int32_t count) {
    uint64_t odd[2] = {0xaaaaaaaaaaaaaaaaULL, 0xaaaaaaaaaaaaaaaaULL};
    Duplicate(Halves(x), static_cast<uint16_t>(0), odd, Repeats(count), 1, 8);
  }

 private:
  __aicore__ inline static LocalTensor<uint16_t> Halves(const Tensor& x) { return x.ReinterpretCast<uint16_t>(); }
  __aicore__ inline static uint8_t Repeats(int32_t count) {
    return static_cast<uint8_t>((count + kLanes - 1) / kLanes);
  }

  // Low halves stay in x, high ones go to `high`.
  __aicore__ inline static void Split(const Tensor& x, const Tensor& high, int32_t count) {
    ShiftRight(high.ReinterpretCast<uint32_t>(), x.ReinterpretCast<uint32_t>(), 16U, count);
    ClearHigh(x, count);
    PipeBarrier<PIPE_V>();
  }

  // x = 2^16 (x + (low >> 16)) + (low & 0xffff).
  __aicore__ inline static void Join(const Tensor& x, const Tensor& low, const Tensor& carry, int32_t count) {
    const uint64_t even[2] = {0x5555555555555555ULL, 0x5555555555555555ULL};
    ShiftRight(carry, low, 16, count);
    PipeBarrier<PIPE_V>();
    Add(x, x, carry, count);
    PipeBarrier<PIPE_V>();
    ShiftLeft(x.ReinterpretCast<uint32_t>(), x.ReinterpretCast<uint32_t>(), 16U, count);
    PipeBarrier<PIPE_V>();
    Copy(Halves(x), Halves(low), even, Repeats(count), CopyRepeatParams{1, 1, 8, 8});
    PipeBarrier<PIPE_V>();
  }
};

}  // namespace turbogr
