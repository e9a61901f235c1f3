// Losses of a group of positions that share negatives: products of small matrices.
//
// Lanes of a vector are positions of the group, its members. A tile of logits is kTile rows times one vector of
// members; rows lie in panels (panels.h), so that offsets from row to row are known to the compiler.
#pragma once

#include "panels.h"
#include "sampled_loss.h"

namespace turbogr {

constexpr int kTile = 12;
static_assert(kRows % kTile == 0, "rows come in whole tiles");

// logits[i][...] = sum over k of rows[i][k] * query[k][...] for kTile rows in panels of kRows, and one vector of members.
inline __attribute__((noinline)) void logit_tile(int64_t depth, const Real* rows, const Real* query, int64_t pitch,
                                                 Real* logits) {
  V sums[kTile] = {};
  for (int64_t k = 0; k < depth; k += kWide, rows += kRows * kWide) {
    const int64_t count = std::min<int64_t>(kWide, depth - k);
    for (int64_t c = 0; c < count; ++c, query += kLane) {
      const V members = load(query);
#pragma GCC unroll 12
      for (int i = 0; i < kTile; ++i) sums[i] += broadcast(rows[i * kWide + c]) * members;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kTile; ++i) store(logits + i * pitch, sums[i]);
}

// grad[m][...] += sum over i of shares[i][m] * rows[i][...] for kSome members, in one panel.
template <int kSome>
inline __attribute__((noinline)) void gradient_tile(int64_t count, const Real* shares, int64_t pitch, const Real* rows,
                                                    Real* grad) {
  V sums[kSome][2];
  for (int m = 0; m < kSome; ++m)
    for (int v = 0; v < 2; ++v) sums[m][v] = load(grad + m * kWide + v * kLane);
  for (int64_t i = 0; i < count; ++i, shares += pitch, rows += kWide) {
    const V left = load(rows), right = load(rows + kLane);
#pragma GCC unroll 8
    for (int m = 0; m < kSome; ++m) {
      const V share = broadcast(shares[m]);
      sums[m][0] += share * left;
      sums[m][1] += share * right;
    }
  }
  for (int m = 0; m < kSome; ++m)
    for (int v = 0; v < 2; ++v) store(grad + m * kWide + v * kLane, sums[m][v]);
}

// Memory of a thread for one group.
struct GroupRoom {
  Scratch memory;
  Real *query, *grad, *rows, *shares;           // transposed; panels; panels; rows x members
  Real *top, *sum, *positive, *weight, *loss;  // of members

  // All members of `width`, which are whole vectors.
  void arrange(int64_t width, int64_t depth) {
    const int64_t wide = up(depth, kWide), sizes[] = {width * wide, width * wide, kRows * wide, kRows * width};
    int64_t all = 5 * width;
    for (const int64_t size : sizes) all += size;
    Real* at = (Real*)memory.room(size_t(all) * sizeof(Real));
    std::fill(at, at + all, Real(0));
    Real** const parts[] = {&query, &grad, &rows, &shares};
    for (int i = 0; i < 4; at += sizes[i++]) *parts[i] = at;
    for (Real** part : {&top, &sum, &positive, &weight, &loss}) *part = at, at += width;
  }
};

template <typename S>
class GroupLoss {
 public:
  GroupLoss(const SampledLossArguments& a, const TableRows<S>& rows, int64_t group)
      : a_(a), rows_(rows), room_(own<GroupRoom>()), depth_(a.lookup.depth), first_(group * a.group) {
    members_ = std::min(a.group, a.positions - first_);
    width_ = up(a.group, std::max<int64_t>(kLane, kSome));
    room_.arrange(width_, depth_);
    for (int64_t m = 0; m < members_; ++m) {
      const Positive positive(a, first_ + m);
      room_.positive[m] = room_.top[m] = positive.logit;
      room_.sum[m] = positive.logit == kNone ? Real(0) : std::exp(positive.logit - positive.logit);
      room_.weight[m] = positive.weight;
    }
    for (int64_t c = 0; c < width_; c += kLane)
      for (int64_t k = 0; k < depth_; ++k)
        for (int64_t m = c; m < std::min<int64_t>(members_, c + kLane); ++m)
          room_.query[c * depth_ + k * kLane + (m - c)] = a.query[(first_ + m) * depth_ + k];
  }

  void run(std::vector<int64_t>& hits) {
    hits.clear();
    const int64_t begin = first_ * a_.each, end = begin + members_ * a_.each;
    for (int64_t entry = begin; entry < end; entry += kRows) {
      const int64_t count = std::min(kRows, end - entry);
      const size_t before = hits.size();
      next_ = entry + kRows;
      look(entry, count);
      if (a_.masked) mask(entry, count, hits);
      a_.softmax ? add_softmax(entry, count) : add_binary(entry, count);
      if (a_.query_grad != nullptr) {
        for (size_t h = before; h < hits.size(); ++h) room_.shares[hits[h] - entry * width_] = 0;
        add_gradient(count);
      }
      foresee(kRows);
    }
    finish(begin, end, hits);
  }

 private:
  static constexpr int kSome = 4;  // members of a tile of the gradient

  // Asks for rows that come next, a few at a time: the machine has room for so many questions only.
  void foresee(int64_t count) {
    for (; count > 0 && asked_ < next_ + kRows; --count) rows_.prefetch(asked_++);
  }

  void look(int64_t entry, int64_t count) {
    asked_ = std::max(asked_, next_);
    rows_.announce(next_, kRows);
    pack_panels<S>([&](int64_t i) { return rows_.at(entry + i); }, count, kRows, depth_, Real(1), room_.rows);
    for (int64_t i = 0; i < count; ++i) factors_[i] = rows_.factor(entry + i);
    for (int64_t i = 0; i < count; i += kTile) {
      for (int64_t c = 0; c < width_; c += kLane)
        logit_tile(depth_, room_.rows + i * kWide, room_.query + c * depth_, width_, room_.shares + i * width_ + c);
      foresee(2);
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < width_; c += kLane) {
        Real* logits = room_.shares + i * width_ + c;
        store(logits, broadcast(Real(a_.scale) * factors_[i]) * load(logits));
      }
  }

  // Numbers of hits are places in a table of entries times width_.
  void mask(int64_t entry, int64_t count, std::vector<int64_t>& hits) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = a_.ids[entry + i];
      bool any = false;
      for (int64_t m = 0; m < members_; ++m) any |= a_.own_ids[first_ + m] == id;
      if (!any) continue;
      for (int64_t m = 0; m < members_; ++m) {
        if (a_.own_ids[first_ + m] != id) continue;
        room_.shares[i * width_ + m] = Real(a_.hit);
        hits.push_back((entry + i) * width_ + m);
      }
    }
  }

  void add_softmax(int64_t entry, int64_t count) {
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = room_.shares + c;
      const V before = load(room_.top + c);
      V top = before;
      for (int64_t i = 0; i < count; ++i) top = larger(load(at + i * width_), top);
      rescale(c, before, top);
      store(room_.top + c, top);
      const V shift = shift_of(top);
      V sums = {};
      for (int64_t i = 0; i < count; ++i) {
        const V logit = load(at + i * width_), share = exp_or_zero(logit - shift);
        keep(entry + i, c, logit);
        sums += share;
        store(at + i * width_, share * broadcast(factors_[i]));
      }
      store(room_.sum + c, load(room_.sum + c) + sums);
    }
  }

  // Sums so far were of exponentials that were taken with another top.
  void rescale(int64_t c, V before, V top) {
    Real less[kLane], was[kLane], now[kLane];
    store(was, before);
    store(now, top);
    for (int m = 0; m < kLane; ++m) {
      if (!(now[m] > was[m])) continue;
      less[m] = std::exp(was[m] - now[m]);
      room_.sum[c + m] *= less[m];
      if (a_.query_grad == nullptr) continue;
      for (int64_t k = 0; k < depth_; k += kWide) {
        Real* grad = room_.grad + k * width_ + (c + m) * kWide;
        for (int v = 0; v < kWide; v += kLane) store(grad + v, load(grad + v) * broadcast(less[m]));
      }
    }
  }

  void add_binary(int64_t entry, int64_t count) {
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = room_.shares + c;
      V sums = {};
      for (int64_t i = 0; i < count; ++i) {
        const V logit = load(at + i * width_), share = sigmoid<Real>(logit);
        sums += softplus(logit);
        keep(entry + i, c, share * load(room_.weight + c));
        store(at + i * width_, share * broadcast(factors_[i]));
      }
      store(room_.loss + c, load(room_.loss + c) + sums);
    }
  }

  // Members that there are, of one entry's slopes.
  TURBOGR_INLINE void keep(int64_t entry, int64_t c, V x) {
    if (a_.slopes == nullptr) return;
    Real* to = a_.slopes + entry * a_.group + c;
    c + kLane <= a_.group ? store_lanes(to, x, Whole{}) : store_lanes(to, x, Part{a_.group - c});
  }

  void add_gradient(int64_t count) {
    for (int64_t k = 0; k < depth_; k += kWide) {
      for (int64_t m = 0; m < width_; m += kSome)
        gradient_tile<kSome>(count, room_.shares + m, width_, room_.rows + k * kRows,
                             room_.grad + k * width_ + m * kWide);
      foresee(2);
    }
  }

  void finish(int64_t begin, int64_t end, const std::vector<int64_t>& hits) {
    Real* log_sum = room_.loss;  // which is not needed any more once losses are known
    for (int64_t m = 0; m < members_; ++m) {
      const int64_t t = first_ + m;
      const Positive positive(a_, t);
      const Real sums = shift_of(room_.top[m]) + std::log(room_.sum[m]);
      a_.loss[t] = a_.softmax ? sums - positive.logit : room_.loss[m] + positive.binary_loss();
      log_sum[m] = sums;
      const Real slope = positive.slope(a_, sums);
      if (a_.own_slopes != nullptr) a_.own_slopes[t] = slope;
      if (a_.query_grad == nullptr) continue;
      const Real* own = a_.own + t * depth_;
      Real* to = a_.query_grad + t * depth_;
      unpack_row(room_.grad, width_, m, depth_, a_.softmax ? positive.weight / room_.sum[m] : positive.weight, to);
      const Real weight = slope * positive.factor;
      add_rows(&own, &weight, 1, depth_, to);
    }
    if (a_.slopes == nullptr) return;
    if (a_.softmax)
      for (int64_t c = 0; c < a_.group; c += kLane) {
        const V shift = load(log_sum + c), weight = load(room_.weight + c);
        const auto slope = [&](V logit) { return weight * exp_or_zero(logit - shift); };
        for (int64_t entry = begin; entry < end; ++entry) {
          Real* at = a_.slopes + entry * a_.group + c;
          if (c + kLane <= a_.group) {
            store(at, slope(load(at)));
          } else {
            const Part part{a_.group - c};
            store_lanes(at, slope(load_lanes(at, part)), part);
          }
        }
      }
    for (const int64_t hit : hits) a_.slopes[hit / width_ * a_.group + hit % width_] = 0;
  }

  const SampledLossArguments& a_;
  const TableRows<S>& rows_;
  GroupRoom& room_;
  const int64_t depth_, first_;
  int64_t members_, width_, next_ = 0, asked_ = 0;
  Real factors_[kRows];
};

}  // namespace turbogr
