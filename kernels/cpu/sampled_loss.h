// Losses against sampled negatives: what one position alone and a group of positions have in common.
#pragma once

#include <limits>
#include <vector>

#include "lookup.h"

namespace turbogr {

struct SampledLossArguments {
  Lookup lookup;            // of negatives: positions x each
  const Real* query;        // positions x depth
  const Real* own;          // positions x depth: rows of positives
  const int64_t* own_ids;   // of positives
  const int64_t* ids;       // of negatives
  const Real* weights;      // of losses; may be null
  Real* loss;               // of each position
  Real* total;              // sum of losses times weights
  Real* query_grad;         // of the weighted sum; may be null
  Real* slopes;             // positions x each x group, of products; may be null
  Real* own_slopes;         // of products with positives; may be null
  int64_t positions, each, group;
  int64_t softmax;  // or the binary loss
  int64_t masked;   // a negative that is the positive has the logit `hit` instead
  int64_t threads;
  double scale, hit;
};

constexpr Real kNone = -std::numeric_limits<Real>::infinity();

// What is subtracted from logits before their exponential.
TURBOGR_INLINE Real shift_of(Real top) { return top == kNone ? Real(0) : top; }
TURBOGR_INLINE Lanes shift_of(Lanes top) { return top == kNone ? Lanes{} : top; }

// log(1 + e^x), and its derivative.
TURBOGR_INLINE Lanes softplus(Lanes x) {
  const Lanes size = x < Real(0) ? -x : x;
  return larger(x, Lanes{}) + log_one_plus(exp(-size));
}

// The positive of a position: its logit, the factor of its row, and what becomes of them.
struct Positive {
  Real logit, factor, weight;  // the weight includes the scale of logits

  Positive(const SampledLossArguments& a, int64_t t) {
    const Real* row = a.own + t * a.lookup.depth;
    const Real eps = Real(a.lookup.eps);
    factor = eps < 0 ? Real(1) : 1 / std::max(TableRows<Real>::norm(row, a.lookup.depth), eps);
    logit = Real(a.scale) * factor * product(row, a.query + t * a.lookup.depth, a.lookup.depth);
    weight = (a.weights == nullptr ? Real(1) : a.weights[t]) * Real(a.scale);
  }

  // Slope of the product with the positive's row.
  Real slope(const SampledLossArguments& a, Real log_sum) const {
    return weight * (a.softmax ? std::expm1(logit - log_sum) : -1 / (1 + std::exp(logit)));
  }

  Real binary_loss() const { return std::max(-logit, Real(0)) + std::log1p(std::exp(-std::abs(logit))); }
};

}  // namespace turbogr
