// Cross-entropy of a tile of logits: some rows, and all or some of the classes.
#include <algorithm>
#include <limits>

#include "rowwise.h"

namespace turbogr {

struct LossTileArguments {
  Real* logits;           // rows x columns, one row `stride` after the other
  const Real* bias;       // of the tile's columns; added in place, may be null
  const int64_t* target;  // class of each row
  double* sum;            // of exp(logit - top) so far
  double* total;          // of all logits so far
  Real* top;              // largest logit of a row so far
  Real* picked;           // logit of the row's target, once its tile was here
  Real* log_sum;          // of exp(logit) over all classes
  Real* loss;
  const Real* grad;  // of each row's loss
  int64_t rows, columns, stride;
  int64_t first, classes;  // class of the tile's first column, and number of all
  int64_t measure;         // look at the tile; the last one of a row sets log_sum and loss
  int64_t slopes;          // replace logits by the gradient of the loss
  int64_t threads;
  double smoothing;  // share of the loss that goes to all classes alike
};

namespace {

constexpr int64_t kRowsPerTask = 4;
// Sums in Real stay short; sums of those are in double.
constexpr int64_t kRun = 64 * kWidth;

// Up to kWidth numbers, then `rest`.
TURBOGR_INLINE Vector<Real> load_part(const Real* from, int64_t count, Real rest) {
  Real lanes[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] = lane < count ? from[lane] : rest;
  return load(lanes);
}

TURBOGR_INLINE void store_part(Real* to, Vector<Real> x, int64_t count) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = x[lane];
}

void add(Real* row, const Real* bias, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] += bias[i];
}

// Not a number is not looked at: it shows in the sum.
Real largest(const Real* row, int64_t count) {
  const Real none = -std::numeric_limits<Real>::infinity();
  Vector<Real> a = broadcast(none), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth) {
    a = larger(load(row + i), a);
    b = larger(load(row + i + kWidth), b);
    c = larger(load(row + i + 2 * kWidth), c);
    d = larger(load(row + i + 3 * kWidth), d);
  }
  for (; i < count; i += kWidth) a = larger(load_part(row + i, count - i, none), a);
  return maximum<Real>(larger(larger(a, b), larger(c, d)));
}

// body(vector) summed over a row; `rest` fills the last vector.
template <typename Body>
TURBOGR_INLINE double sum_of(const Real* row, int64_t count, Real rest, Body body) {
  double total = 0;
  for (int64_t start = 0; start < count; start += kRun) {
    const int64_t end = std::min(start + kRun, count);
    Vector<Real> a = zeros<Real>(), b = a;
    int64_t i = start;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      a += body(load(row + i));
      b += body(load(row + i + kWidth));
    }
    for (; i < end; i += kWidth) a += body(load_part(row + i, end - i, rest));
    total += double(sum<Real>(a + b));
  }
  return total;
}

double sum_of_exp(const Real* row, Real top, int64_t count) {
  const Real none = -std::numeric_limits<Real>::infinity();
  const Vector<Real> shift = broadcast(top == none ? Real(0) : top);
  return sum_of(row, count, none, [&](Vector<Real> x) { return exp_or_zero(x - shift); });
}

double sum_of_all(const Real* row, int64_t count) {
  return sum_of(row, count, Real(0), [](Vector<Real> x) { return x; });
}

// row = gain * (exp(row - log_sum) - share)
void to_slopes(Real* row, Real log_sum, Real gain, Real share, int64_t count) {
  const Vector<Real> shift = broadcast(log_sum), factor = broadcast(gain), less = broadcast(share);
  const auto slope = [&](Vector<Real> x) { return (exp_or_zero(x - shift) - less) * factor; };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(row + i, slope(load(row + i)));
  if (i < count) store_part(row + i, slope(load_part(row + i, count - i, log_sum)), count - i);
}

void measure(const LossTileArguments& a, const Real* row, int64_t r) {
  const Real before = a.first == 0 ? -std::numeric_limits<Real>::infinity() : a.top[r];
  const double summed = a.first == 0 ? 0 : a.sum[r], added = a.first == 0 ? 0 : a.total[r];
  const Real top = a.top[r] = std::max(before, largest(row, a.columns));
  // Nothing was seen before, or only -inf: there is no sum to carry over.
  const double carried = summed == 0 ? 0 : summed * std::exp(double(before) - double(top));
  a.sum[r] = carried + sum_of_exp(row, top, a.columns);
  if (a.smoothing != 0) a.total[r] = added + sum_of_all(row, a.columns);
}

void finish(const LossTileArguments& a, int64_t r) {
  const double log_sum = double(a.top[r]) + std::log(a.sum[r]);
  const double smoothed = a.smoothing == 0 ? 0 : a.smoothing * (a.total[r] / double(a.classes));
  a.log_sum[r] = Real(log_sum);
  a.loss[r] = Real(log_sum - (1 - a.smoothing) * double(a.picked[r]) - smoothed);
}

void treat(const LossTileArguments& a, int64_t r) {
  Real* row = a.logits + r * a.stride;
  const int64_t column = a.target[r] - a.first;
  const bool has_target = column >= 0 && column < a.columns;
  if (a.bias != nullptr) add(row, a.bias, a.columns);
  if (a.measure) {
    measure(a, row, r);
    if (has_target) a.picked[r] = row[column];
    if (a.first + a.columns == a.classes) finish(a, r);
  }
  if (a.slopes) {
    to_slopes(row, a.log_sum[r], a.grad[r], Real(a.smoothing / double(a.classes)), a.columns);
    if (has_target) row[column] -= a.grad[r] * Real(1 - a.smoothing);
  }
}

}  // namespace

extern "C" const char* turbogr_loss_tile(const LossTileArguments* a) {
  return guarded([&]() -> const char* {
    const int64_t tasks = (a->rows + kRowsPerTask - 1) / kRowsPerTask;
    parallel_for(tasks, a->threads, [&](int64_t task) {
      const int64_t end = std::min(a->rows, (task + 1) * kRowsPerTask);
      for (int64_t r = task * kRowsPerTask; r < end; ++r) treat(*a, r);
    });
    return nullptr;
  });
}

}  // namespace turbogr
