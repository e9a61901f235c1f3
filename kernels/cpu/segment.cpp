// Softmax over the rows of each sequence, and its derivative. Columns are independent: they are the lanes of vectors.
// Those that fill no vector are done one by one.
#include <limits>

#include "rowwise.h"

namespace turbogr {
namespace {

struct SegmentArguments {
  const void *x, *grad;  // scores for the forward; its results and their gradients for the backward
  void* result;
  const int64_t* offsets;
  int64_t rows, width, x_stride, grad_stride, bounds, type, threads;
};

constexpr Real kLowest = -std::numeric_limits<Real>::infinity();

// --- forward ---

template <typename S>
struct Softmax {
  const S* x;
  S* to;
  int64_t stride, rows, width;

  int64_t vectors() const {
    int64_t at = 0;
    for (; at + kWidth <= width; at += kWidth) {
      const auto score = [&](int64_t row) { return load_lanes(x + row * stride + at, Whole{}); };
      Lanes top = broadcast(kLowest), all = {};
      for (int64_t row = 0; row < rows; ++row) top = larger(score(row), top);
      for (int64_t row = 0; row < rows; ++row) all += exp_or_zero(score(row) - top);
      const Lanes share = Real(1) / all;
      for (int64_t row = 0; row < rows; ++row)
        store_lanes(to + row * width + at, exp_or_zero(score(row) - top) * share, Whole{});
    }
    return at;
  }

  // Brought together in memory, where rows are the lanes.
  void column(int64_t at) const {
    static thread_local Scratch scratch;
    Real* line = (Real*)scratch.room(size_t(rows) * sizeof(Real));
    for (int64_t row = 0; row < rows; ++row) line[row] = widen(x[row * stride + at]);
    Lanes tops = broadcast(kLowest);
    across(rows, [&](int64_t i, auto cut) { tops = larger(kept(load_lanes(line + i, cut), cut, kLowest), tops); });
    const Real top = maximum<Real>(tops);
    const Real all = total(rows, [&](int64_t i, auto cut) {
      const Lanes power = kept(exp_or_zero(load_lanes(line + i, cut) - top), cut);
      store_lanes(line + i, power, cut);
      return power;
    });
    const Real share = Real(1) / all;
    for (int64_t row = 0; row < rows; ++row) narrow(line[row] * share, to + row * width + at);
  }
};

// --- backward: out · (grad - sum of out · grad) ---

// In double throughout: a shift of all scores has gradient zero, and sums in float leave more of it than there is.
struct Wide {
  double lane[kWidth];
};

template <typename S>
TURBOGR_INLINE Wide load_wide(const S* from) {
  Real all[kWidth];
  store(all, load_lanes(from, Whole{}));
  Wide x;
  for (int64_t i = 0; i < kWidth; ++i) x.lane[i] = all[i];
  return x;
}

template <typename S>
struct Slopes {
  const S *out, *grad;
  S* to;
  int64_t out_stride, grad_stride, rows, width;

  int64_t vectors() const {
    int64_t at = 0;
    for (; at + kWidth <= width; at += kWidth) {
      Wide sum = {};
      for (int64_t row = 0; row < rows; ++row) {
        const Wide weight = load_wide(out + row * out_stride + at), slope = load_wide(grad + row * grad_stride + at);
        for (int64_t i = 0; i < kWidth; ++i) sum.lane[i] += weight.lane[i] * slope.lane[i];
      }
      for (int64_t row = 0; row < rows; ++row) {
        const Wide weight = load_wide(out + row * out_stride + at), slope = load_wide(grad + row * grad_stride + at);
        Real all[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) all[i] = Real(weight.lane[i] * (slope.lane[i] - sum.lane[i]));
        store_lanes(to + row * width + at, load(all), Whole{});
      }
    }
    return at;
  }

  void column(int64_t at) const {
    const auto weight = [&](int64_t row) { return double(widen(out[row * out_stride + at])); };
    const auto slope = [&](int64_t row) { return double(widen(grad[row * grad_stride + at])); };
    double sums[4] = {};
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
      for (int64_t i = 0; i < 4; ++i) sums[i] += weight(row + i) * slope(row + i);
    for (; row < rows; ++row) sums[0] += weight(row) * slope(row);
    const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (row = 0; row < rows; ++row) narrow(Real(weight(row) * (slope(row) - sum)), to + row * width + at);
  }
};

// --- sequences ---

// of(first row, number of rows) says what is to be done for a sequence; rows of none are zero.
template <typename S, typename Of>
void for_sequences(const SegmentArguments& a, Of of) {
  const int64_t sequences = a.bounds - 1, begin = a.offsets[0], end = a.offsets[sequences];
  S* result = (S*)a.result;
  std::fill_n(result, begin * a.width, S{});
  std::fill_n(result + end * a.width, (a.rows - end) * a.width, S{});
  const int64_t mean = (end - begin) * a.width / std::max<int64_t>(1, sequences);
  for_rows(sequences, rows_per_chunk(mean), a.threads, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      if (a.offsets[s] == a.offsets[s + 1]) continue;
      const auto sequence = of(a.offsets[s], a.offsets[s + 1] - a.offsets[s]);
      for (int64_t at = sequence.vectors(); at < a.width; ++at) sequence.column(at);
    }
  });
}

template <typename S>
void forward(const SegmentArguments& a, S*) {
  for_sequences<S>(a, [&](int64_t first, int64_t rows) {
    return Softmax<S>{(const S*)a.x + first * a.x_stride, (S*)a.result + first * a.width, a.x_stride, rows, a.width};
  });
}

template <typename S>
void backward(const SegmentArguments& a, S*) {
  for_sequences<S>(a, [&](int64_t first, int64_t rows) {
    const S *out = (const S*)a.x + first * a.x_stride, *grad = (const S*)a.grad + first * a.grad_stride;
    return Slopes<S>{out, grad, (S*)a.result + first * a.width, a.x_stride, a.grad_stride, rows, a.width};
  });
}

}  // namespace

extern "C" const char* turbogr_segment_softmax(const SegmentArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { forward(*a, storage); });
  });
}

extern "C" const char* turbogr_segment_softmax_backward(const SegmentArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { backward(*a, storage); });
  });
}

}  // namespace turbogr
