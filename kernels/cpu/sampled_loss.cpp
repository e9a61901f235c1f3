// Losses against negatives that each position has for itself, or that groups of positions share.
//
// Negatives come some rows at a time. While these are close, their logits are computed, and what they add to the
// gradient of the query: with the softmax of what was seen so far, which is corrected whenever a larger logit comes.
// Logits are kept where slopes are wanted, and become slopes once the sum over all of them is known.
#include "sampled_loss.h"

#include "group_loss.h"

namespace turbogr {
namespace {

template <typename S>
class PositionLoss {
 public:
  PositionLoss(const SampledLossArguments& a, const TableRows<S>& rows, int64_t t)
      : a_(a), rows_(rows), t_(t), positive_(a, t), query_(a.query + t * a.lookup.depth) {
    if (a.query_grad != nullptr) {
      grad_ = a.query_grad + t * a.lookup.depth;
      std::fill(grad_, grad_ + a.lookup.depth, Real(0));
    }
    top_ = positive_.logit;
    sum_ = top_ == kNone ? Real(0) : std::exp(top_ - top_);  // not a number, where the logit is infinite
  }

  void run(std::vector<int64_t>& hits) {
    hits.clear();
    const int64_t first = t_ * a_.each, last = first + a_.each;
    for (int64_t entry = first; entry < last; entry += kRows) {
      const int64_t count = std::min(kRows, last - entry);
      look(entry, count, hits);
      a_.softmax ? add_softmax(count) : add_binary(count);
      if (a_.slopes != nullptr) std::copy(logits_, logits_ + count, a_.slopes + entry);
      if (grad_ != nullptr) add_gradient(entry, count, hits);
    }
    finish(hits);
  }

 private:
  // Logits of rows, and their addresses.
  void look(int64_t entry, int64_t count, std::vector<int64_t>& hits) {
    const int64_t own = a_.own_ids[t_];
    rows_.announce(entry + kRows, count);
    for (int64_t i = 0; i < count; ++i) {
      rows_.prefetch(entry + kRows + i);
      near_[i] = rows_.at(entry + i);
      factors_[i] = rows_.factor(entry + i);
      logits_[i] = Real(a_.scale) * factors_[i] * product(near_[i], query_, a_.lookup.depth);
      if (a_.masked && a_.ids[entry + i] == own) {
        logits_[i] = Real(a_.hit);
        hits.push_back(entry + i);
      }
    }
    for (int64_t i = count; i < up_to_lanes(count); ++i) logits_[i] = kNone;
  }

  static constexpr int64_t up_to_lanes(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }
  static constexpr int64_t kPadded = (kRows + kWidth - 1) / kWidth * kWidth;

  void add_softmax(int64_t count) {
    Lanes most = broadcast(kNone);
    for (int64_t i = 0; i < count; i += kWidth) most = larger(load(logits_ + i), most);
    const Real top = std::max(top_, maximum<Real>(most));
    if (top > top_) {
      const Real less = std::exp(top_ - top);
      sum_ *= less;
      if (grad_ != nullptr)
        across(a_.lookup.depth, [&](int64_t at, auto cut) {
          store_lanes(grad_ + at, load_lanes(grad_ + at, cut) * broadcast(less), cut);
        });
      top_ = top;
    }
    const Lanes shift = broadcast(shift_of(top_));
    Lanes sums = {};
    for (int64_t i = 0; i < count; i += kWidth) {
      const Lanes share = exp_or_zero(load(logits_ + i) - shift);
      sums += share;
      store(shares_ + i, share);
    }
    sum_ += sum<Real>(sums);
  }

  void add_binary(int64_t count) {
    Lanes sums = {};
    for (int64_t i = 0; i < count; i += kWidth) {
      const Lanes logit = load(logits_ + i);
      sums += softplus(logit);
      store(shares_ + i, sigmoid<Real>(logit));
    }
    loss_ += sum<Real>(sums);
    if (a_.slopes != nullptr) {
      for (int64_t i = 0; i < count; ++i) logits_[i] = positive_.weight * shares_[i];
    }
  }

  // What hits are multiplied with is no function of the query.
  void add_gradient(int64_t entry, int64_t count, const std::vector<int64_t>& hits) {
    for (size_t h = hits.size(); h > 0 && hits[h - 1] >= entry; --h) shares_[hits[h - 1] - entry] = 0;
    for (int64_t i = 0; i < count; ++i) shares_[i] *= factors_[i];
    add_rows(near_, shares_, count, a_.lookup.depth, grad_);
  }

  void finish(const std::vector<int64_t>& hits) {
    const Real log_sum = shift_of(top_) + std::log(sum_);
    a_.loss[t_] = a_.softmax ? log_sum - positive_.logit : loss_ + positive_.binary_loss();
    const Real slope = positive_.slope(a_, log_sum);
    if (grad_ != nullptr) {
      const Real* own = a_.own + t_ * a_.lookup.depth;
      const Lanes factor = broadcast(a_.softmax ? positive_.weight / sum_ : positive_.weight);
      const Lanes of_own = broadcast(slope * positive_.factor);
      across(a_.lookup.depth, [&](int64_t at, auto cut) {
        store_lanes(grad_ + at, factor * load_lanes(grad_ + at, cut) + of_own * load_lanes(own + at, cut), cut);
      });
    }
    if (a_.own_slopes != nullptr) a_.own_slopes[t_] = slope;
    if (a_.slopes == nullptr) return;
    Real* slopes = a_.slopes + t_ * a_.each;
    if (a_.softmax)
      across(a_.each, [&](int64_t at, auto cut) {
        const Lanes share = exp_or_zero(load_lanes(slopes + at, cut) - broadcast(log_sum));
        store_lanes(slopes + at, broadcast(positive_.weight) * share, cut);
      });
    for (const int64_t hit : hits) a_.slopes[hit] = 0;
  }

  const SampledLossArguments& a_;
  const TableRows<S>& rows_;
  const int64_t t_;
  const Positive positive_;
  const Real* query_;
  Real* grad_ = nullptr;
  Real top_, sum_, loss_ = 0;
  const S* near_[kRows];
  Real logits_[kPadded], shares_[kPadded], factors_[kRows];
};

// In the order of positions, whatever threads there were.
Real weighted_total(const SampledLossArguments& a) {
  double total = 0;
  for (int64_t t = 0; t < a.positions; ++t)
    total += double(a.loss[t]) * double(a.weights == nullptr ? Real(1) : a.weights[t]);
  return Real(total);
}

}  // namespace

extern "C" const char* turbogr_sampled_loss(const SampledLossArguments* a) {
  return guarded([&]() -> const char* {
    const char* error = for_storage(a->lookup.type, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      const TableRows<S> rows(a->lookup);
      const int64_t groups = (a->positions + a->group - 1) / a->group, entries = a->each * a->group;
      for_rows(groups, rows_per_chunk(entries * a->group * a->lookup.depth), a->threads, [&](int64_t first, int64_t last) {
        std::vector<int64_t> hits;
        for (int64_t g = first; g < last; ++g) {
          if (a->group == 1) {
            PositionLoss<S>(*a, rows, g).run(hits);
          } else {
            GroupLoss<S>(*a, rows, g).run(hits);
          }
        }
      });
    });
    *a->total = weighted_total(*a);
    return error;
  });
}

}  // namespace turbogr
