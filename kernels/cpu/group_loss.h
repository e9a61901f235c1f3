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
  Real *query, *grad, *rows, *shares;  // transposed, times the scale of logits; panels; panels; rows x members
  Real* tops;                          // what was subtracted from logits of some rows: x members
  Real *top, *sum, *weight, *loss;     // of members

  // All members of `width`, which are whole vectors.
  void arrange(int64_t width, int64_t depth, int64_t entries) {
    const int64_t wide = up(depth, kWide), times = (entries + kRows - 1) / kRows;
    const int64_t sizes[] = {width * wide, width * wide, kRows * wide, kRows * width, times * width};
    int64_t all = 4 * width;
    for (const int64_t size : sizes) all += size;
    Real* at = (Real*)memory.room(size_t(all) * sizeof(Real));
    std::fill(at, at + all, Real(0));
    Real** const parts[] = {&query, &grad, &rows, &shares, &tops};
    for (int i = 0; i < 5; at += sizes[i++]) *parts[i] = at;
    for (Real** part : {&top, &sum, &weight, &loss}) *part = at, at += width;
  }
};

// Says fast of most numbers that they are not among a few.
class Few {
 public:
  Few(const int64_t* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) seen_[word(numbers[i])] |= bit(numbers[i]);
  }

  TURBOGR_INLINE bool may_have(int64_t number) const { return seen_[word(number)] & bit(number); }

 private:
  static constexpr int kWords = 64;
  static TURBOGR_INLINE uint64_t word(int64_t number) { return uint64_t(number) / 64 % kWords; }
  static TURBOGR_INLINE uint64_t bit(int64_t number) { return uint64_t(1) << (uint64_t(number) % 64); }
  uint64_t seen_[kWords] = {};
};

template <typename S>
class GroupLoss {
 public:
  GroupLoss(const SampledLossArguments& a, const TableRows<S>& rows, int64_t group)
      : a_(a),
        rows_(rows),
        room_(own<GroupRoom>()),
        depth_(a.lookup.depth),
        first_(group * a.group),
        members_(std::min(a.group, a.positions - first_)),
        width_(up(a.group, std::max<int64_t>(kLane, kSome))),
        begin_(first_ * a.each),
        end_(begin_ + members_ * a.each),
        own_ids_(a.own_ids + first_, members_),
        asked_(begin_ + kRows),
        announced_(asked_) {
    room_.arrange(width_, depth_, end_ - begin_);
    for (int64_t m = 0; m < members_; ++m) {
      const Positive positive(a, first_ + m);
      room_.top[m] = positive.logit;
      room_.sum[m] = positive.logit == kNone ? Real(0) : std::exp(positive.logit - positive.logit);
      room_.weight[m] = positive.weight;
    }
    for (int64_t c = 0; c < width_; c += kLane)
      for (int64_t k = 0; k < depth_; ++k)
        for (int64_t m = c; m < std::min<int64_t>(members_, c + kLane); ++m)
          room_.query[c * depth_ + k * kLane + (m - c)] = Real(a.scale) * a.query[(first_ + m) * depth_ + k];
  }

  void run(std::vector<int64_t>& hits) {
    hits.clear();
    for (int64_t entry = begin_; entry < end_; entry += kRows) {
      const int64_t count = std::min(kRows, end_ - entry);
      const size_t before = hits.size();
      look(entry, count);
      if (a_.masked) mask(entry, count, hits);
      a_.softmax ? add_softmax(entry, count) : add_binary(count);
      if (a_.slopes != nullptr) keep(entry, count);
      if (a_.query_grad != nullptr) {
        for (size_t h = before; h < hits.size(); ++h) room_.shares[hits[h] - entry * width_] = 0;
        add_gradient(count);
      }
      foresee(entry + 2 * kRows - asked_);
    }
    finish(hits);
  }

 private:
  static constexpr int kSome = 4;        // members of a tile of the gradient
  static constexpr int64_t kLead = 96;  // rows that are announced together: pages are found while nothing else is done

  // Asks for rows that come next, a few at a time: the machine has room for so many questions only.
  TURBOGR_INLINE void foresee(int64_t count) {
    for (; count > 0; --count, ++asked_) {
      if (announced_ < asked_ + kLead) {
        rows_.announce(announced_, kLead);
        announced_ += kLead;
      }
      rows_.prefetch(asked_);
    }
  }

  void look(int64_t entry, int64_t count) {
    pack_panels<S>([&](int64_t i) { return rows_.at(entry + i); }, count, kRows, depth_, Real(1), room_.rows);
    for (int64_t i = 0; i < count; i += kTile) {
      for (int64_t c = 0; c < width_; c += kLane)
        logit_tile(depth_, room_.rows + i * kWide, room_.query + c * depth_, width_, room_.shares + i * width_ + c);
      foresee(2);
    }
    if (!rows_.have_factors()) return;
    for (int64_t i = 0; i < count; ++i) factors_[i] = rows_.factor(entry + i);
    times_factors(count);
  }

  void times_factors(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < width_; c += kLane) {
        Real* at = room_.shares + i * width_ + c;
        store(at, broadcast(factors_[i]) * load(at));
      }
  }

  // Numbers of hits are places in a table of entries times width_.
  void mask(int64_t entry, int64_t count, std::vector<int64_t>& hits) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = a_.ids[entry + i];
      if (!own_ids_.may_have(id)) continue;
      for (int64_t m = 0; m < members_; ++m) {
        if (a_.own_ids[first_ + m] != id) continue;
        room_.shares[i * width_ + m] = Real(a_.hit);
        hits.push_back((entry + i) * width_ + m);
      }
    }
  }

  void add_softmax(int64_t entry, int64_t count) {
    Real* tops = room_.tops + (entry - begin_) / kRows * width_;
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = room_.shares + c;
      const V before = load(room_.top + c);
      V top = before;
      for (int64_t i = 0; i < count; ++i) top = larger(load(at + i * width_), top);
      rescale(c, before, top);
      store(room_.top + c, top);
      const V shift = shift_of(top);
      store(tops + c, shift);
      V sums = {};
      for (int64_t i = 0; i < count; ++i) {
        const V share = exp_or_zero(load(at + i * width_) - shift);
        sums += share;
        store(at + i * width_, share);
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

  void add_binary(int64_t count) {
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = room_.shares + c;
      V sums = {};
      for (int64_t i = 0; i < count; ++i) {
        const V logit = load(at + i * width_);
        sums += softplus(logit);
        store(at + i * width_, sigmoid<Real>(logit));
      }
      store(room_.loss + c, load(room_.loss + c) + sums);
    }
  }

  // Shares are slopes but for a factor of each member, which is known in the end.
  void keep(int64_t entry, int64_t count) {
    Real* to = a_.slopes + entry * a_.group;
    if (width_ == a_.group) {
      std::copy_n(room_.shares, count * width_, to);
    } else {
      for (int64_t i = 0; i < count; ++i) std::copy_n(room_.shares + i * width_, a_.group, to + i * a_.group);
    }
  }

  void add_gradient(int64_t count) {
    if (rows_.have_factors()) times_factors(count);
    for (int64_t k = 0; k < depth_; k += kWide) {
      for (int64_t m = 0; m < width_; m += kSome)
        gradient_tile<kSome>(count, room_.shares + m, width_, room_.rows + k * kRows,
                             room_.grad + k * width_ + m * kWide);
      foresee(2);
    }
  }

  void finish(const std::vector<int64_t>& hits) {
    for (int64_t m = 0; m < members_; ++m) {
      const int64_t t = first_ + m;
      const Positive positive(a_, t);
      const Real log_sum = shift_of(room_.top[m]) + std::log(room_.sum[m]);
      a_.loss[t] = a_.softmax ? log_sum - positive.logit : room_.loss[m] + positive.binary_loss();
      const Real slope = positive.slope(a_, log_sum);
      if (a_.own_slopes != nullptr) a_.own_slopes[t] = slope;
      if (a_.softmax) room_.weight[m] /= room_.sum[m];
      if (a_.query_grad == nullptr) continue;
      const Real* own = a_.own + t * depth_;
      Real* to = a_.query_grad + t * depth_;
      unpack_row(room_.grad, width_, m, depth_, room_.weight[m], to);
      const Real weight = slope * positive.factor;
      add_rows(&own, &weight, 1, depth_, to);
    }
    if (a_.slopes == nullptr) return;
    for (int64_t entry = begin_; entry < end_; entry += kRows)
      weigh_slopes(entry, std::min(kRows, end_ - entry), room_.tops + (entry - begin_) / kRows * width_);
    for (const int64_t hit : hits) a_.slopes[hit / width_ * a_.group + hit % width_] = 0;
  }

  // Exponentials were taken with the top of their time.
  void weigh_slopes(int64_t entry, int64_t count, const Real* tops) {
    for (int64_t c = 0; c < a_.group; c += kLane) {
      const V weight = load(room_.weight + c);
      const V factor = a_.softmax ? weight * exp_or_zero(load(tops + c) - shift_of(load(room_.top + c))) : weight;
      const auto weigh = [&](auto cut) {
        Real* at = a_.slopes + entry * a_.group + c;
        for (int64_t i = 0; i < count; ++i, at += a_.group) store_lanes(at, factor * load_lanes(at, cut), cut);
      };
      c + kLane <= a_.group ? weigh(Whole{}) : weigh(Part{a_.group - c});
    }
  }

  const SampledLossArguments& a_;
  const TableRows<S>& rows_;
  GroupRoom& room_;
  const int64_t depth_, first_, members_, width_, begin_, end_;
  const Few own_ids_;
  int64_t asked_, announced_;
  Real factors_[kRows];
};

}  // namespace turbogr
