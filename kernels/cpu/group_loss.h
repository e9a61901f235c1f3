// Losses of a group of positions that share negatives: products of small matrices.
//
// Rows are multiplied where they lie, and lines of rows that come later are asked for between products, one at a time:
// the machine waits for some twenty lines at once, and for whoever asks for more, it stops.
#pragma once

#include "panels.h"
#include "sampled_loss.h"

namespace turbogr {

static_assert(kRows % kTall == 0, "rows come in whole tiles");
constexpr int64_t kLine = 64 / int64_t(sizeof(Real));  // columns

// logits[i][...] = product of row i and the members of one vector, for kTall rows.
//
// A vector has two columns of half of the members, so that what is loaded of a row serves two products: query is
// [depth / 2][member][2], and depth is even.
template <typename S>
__attribute__((noinline)) void logit_tile(int64_t depth, const Real* const* rows, const Real* query, Real* logits,
                                          int64_t pitch, const S* const* later) {
  const Real* row[kTall];
  for (int i = 0; i < kTall; ++i) row[i] = rows[i];
  V sums[kTall][2] = {};
  for (int64_t line = 0; line < depth; line += kLine) {
    for (int i = 0; i < kTall / 2; ++i) __builtin_prefetch(later[i] + line);
    const int64_t end = std::min(line + kLine, depth);
#pragma GCC unroll 1
    for (int64_t k = line; k < end; k += 2, query += kWide) {
      const V left = load(query), right = load(query + kLane);
#pragma GCC unroll 12
      for (int i = 0; i < kTall; ++i) {
        const V pair = load_pair(row[i] + k);
        sums[i][0] += pair * left;
        sums[i][1] += pair * right;
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kTall; ++i) store(logits + i * pitch, pair_sums<Real>(sums[i][0], sums[i][1]));
}

// grad[m][...] += sum over i of shares[i][m] * rows[i][...] for kSome members and kWide columns.
template <int kSome, typename S>
__attribute__((noinline)) void gradient_tile(int64_t count, const Real* shares, int64_t pitch, const Real* const* rows,
                                             int64_t column, Real* grad, int64_t wide, const S* const* later) {
  V sums[kSome][2];
  for (int m = 0; m < kSome; ++m)
    for (int v = 0; v < 2; ++v) sums[m][v] = load(grad + m * wide + v * kLane);
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    const V left = load(rows[i] + column), right = load(rows[i] + column + kLane);
#pragma GCC unroll 8
    for (int m = 0; m < kSome; ++m) {
      const V share = broadcast(shares[i * pitch + m]);
      sums[m][0] += share * left;
      sums[m][1] += share * right;
    }
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4, ++later) {
    for (int64_t line = 0; line < kWide; line += kLine) __builtin_prefetch(*later + column + line);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) add(i + j);
  }
  for (; i < count; ++i) add(i);
  for (int m = 0; m < kSome; ++m)
    for (int v = 0; v < 2; ++v) store(grad + m * wide + v * kLane, sums[m][v]);
}

// Memory of a thread for one group.
struct GroupRoom {
  Scratch memory;
  Real *query, *grad, *rows, *shares;  // query as logit_tile reads it, times the scale of logits; shares by members
  Real* tops;                          // what was subtracted from logits of some rows: x members
  Real *top, *sum, *weight, *loss;     // of members

  // All members of `width`, which are whole vectors, and as many columns as are whole tiles.
  void arrange(int64_t width, int64_t wide, int64_t entries) {
    const int64_t times = (entries + kRows - 1) / kRows;
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
        wide_(up(depth_, kWide)),
        own_ids_(a.own_ids + first_, members_),
        announced_(begin_ + kRows) {
    room_.arrange(width_, wide_, end_ - begin_);
    for (int64_t m = 0; m < members_; ++m) {
      const Positive positive(a, first_ + m);
      room_.top[m] = positive.logit;
      room_.sum[m] = positive.logit == kNone ? Real(0) : std::exp(positive.logit - positive.logit);
      room_.weight[m] = positive.weight;
    }
    for (int64_t c = 0; c < width_; c += kLane)
      for (int64_t k = 0; k < depth_; ++k)
        for (int64_t m = c; m < std::min<int64_t>(members_, c + kLane); ++m)
          room_.query[c * wide_ + k / 2 * kWide + 2 * (m - c) + k % 2] =
              Real(a.scale) * a.query[(first_ + m) * depth_ + k];
  }

  void run(std::vector<int64_t>& hits) {
    hits.clear();
    for (int64_t entry = begin_; entry < end_; entry += kRows) {
      const int64_t count = std::min(kRows, end_ - entry);
      const size_t before = hits.size();
      shares_ = in_place(count) ? a_.slopes + entry * width_ : room_.shares;
      look(entry, count);
      if (a_.masked) mask(entry, count, hits);
      a_.softmax ? add_softmax(entry, count) : add_binary(count);
      if (a_.slopes != nullptr && !in_place(count)) keep(entry, count);
      if (a_.query_grad != nullptr) {
        for (size_t h = before; h < hits.size(); ++h) shares_[hits[h] - entry * width_] = 0;
        add_gradient(count);
      }
    }
    finish(hits);
  }

 private:
  static constexpr int kSome = 4;        // members of a tile of the gradient
  static constexpr int64_t kLead = 192;  // rows that are announced together: pages are found while nothing else is done

  // Whether the tiles of `count` rows may write into the slopes. Factors of rows are no part of these.
  bool in_place(int64_t count) const {
    return a_.slopes != nullptr && width_ == a_.group && count % kTall == 0 && !rows_.have_factors();
  }

  void look(int64_t entry, int64_t count) {
    approach(entry, count);
    for (int64_t i = 0; i < count; i += kTall)
      for (int64_t c = 0; c < width_; c += kLane)
        logit_tile(wide_, near_ + i, room_.query + c * wide_, shares_ + i * width_ + c, width_,
                   later_ + kRows / 2 + i / 2);
    if (!rows_.have_factors()) return;
    for (int64_t i = 0; i < count; ++i) factors_[i] = rows_.factor(entry + i);
    times_factors(count);
  }

  // Where rows lie, and those behind them. Tiles read whole vectors, of whole tiles of rows.
  void approach(int64_t entry, int64_t count) {
    if (announced_ < entry + 2 * kRows) {
      rows_.announce(announced_, kLead);
      announced_ += kLead;
    }
    for (int64_t i = 0; i < kRows; ++i) later_[i] = rows_.at(std::min(entry + count + i, a_.lookup.entries - 1));
    for (int64_t i = 0; i < count; ++i) near_[i] = whole(rows_.at(entry + i), room_.rows + i * wide_);
    for (int64_t i = count; i < kRows; ++i) near_[i] = near_[0];
  }

  template <typename T>
  const Real* whole(const T* row, Real* room) const {
    if constexpr (std::is_same_v<T, Real>) {
      if (wide_ == depth_) return row;
    }
    across(depth_, [&](int64_t at, auto cut) { store(room + at, load_lanes(row + at, cut)); });
    return room;
  }

  void times_factors(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < width_; c += kLane) {
        Real* at = shares_ + i * width_ + c;
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
        shares_[i * width_ + m] = Real(a_.hit);
        hits.push_back((entry + i) * width_ + m);
      }
    }
  }

  void add_softmax(int64_t entry, int64_t count) {
    Real* tops = room_.tops + (entry - begin_) / kRows * width_;
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = shares_ + c;
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
    Real was[kLane], now[kLane];
    store(was, before);
    store(now, top);
    for (int m = 0; m < kLane; ++m) {
      if (!(now[m] > was[m])) continue;
      const Real less = std::exp(was[m] - now[m]);
      room_.sum[c + m] *= less;
      if (a_.query_grad == nullptr) continue;
      Real* grad = room_.grad + (c + m) * wide_;
      for (int64_t k = 0; k < wide_; k += kLane) store(grad + k, load(grad + k) * broadcast(less));
    }
  }

  void add_binary(int64_t count) {
    for (int64_t c = 0; c < width_; c += kLane) {
      Real* at = shares_ + c;
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
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(shares_ + i * width_, a_.group, a_.slopes + (entry + i) * a_.group);
  }

  void add_gradient(int64_t count) {
    if (rows_.have_factors()) times_factors(count);
    for (int64_t column = 0; column < wide_; column += kWide)
      for (int64_t m = 0; m < width_; m += kSome)
        gradient_tile<kSome>(count, shares_ + m, width_, near_, column, room_.grad + m * wide_ + column, wide_,
                             later_ + m / kSome % 2 * kRows / 4);
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
      const Real* grad = room_.grad + m * wide_;
      across(depth_, [&](int64_t at, auto cut) { store_lanes(to + at, room_.weight[m] * load(grad + at), cut); });
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
  const int64_t depth_, first_, members_, width_, begin_, end_, wide_;
  const Few own_ids_;
  int64_t announced_;
  Real* shares_ = nullptr;   // logits, then their exponentials: rows x members
  const Real* near_[kRows];  // rows
  const S* later_[kRows];    // those behind them
  Real factors_[kRows];
};

}  // namespace turbogr
