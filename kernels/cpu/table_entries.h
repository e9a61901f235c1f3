// Entries of lookups with the slopes of their products, dealt to windows of rows.
//
// Slopes lie in the order of positions and are wanted by row. Whoever fetches them row by row waits longer for them
// than products take. So each is copied once, in the order in which they lie, to the end of what its window has so far:
// such ends are few, and stay in the caches.
#pragma once

#include <utility>
#include <vector>

#include "lookup.h"

namespace turbogr {

struct TableGradientArguments {
  const Real* slopes;      // entries x group: of the products of an entry's row with the queries of its group
  const Real* own_slopes;  // positions, or null: of the products of a query with the row of its own
  const Real* query;       // positions x depth
  const void* table;       // limit x depth; read where eps is not below zero
  const int64_t* ids;      // positions x each
  const int64_t* own_ids;
  void* result;
  int64_t positions, each, depth, stride, limit, group, type, threads;
  double eps;
};

struct Named {
  uint32_t row;
  uint32_t query;  // the first of its group; where there are groups, a query and kOwn for the row of its own
};
constexpr uint32_t kOwn = uint32_t(1) << 31;

// Rows [row, last), and where the entries lie that name them.
struct Window {
  int64_t row, last, begin, end;
};

class TableEntries {
 public:
  // Cuts the table into windows of `most` entries; of more where a bucket of rows has more.
  void open(const TableGradientArguments& a, int64_t threads, int64_t most) {
    a_ = &a;
    threads_ = threads;
    for (shift_ = 0; (a.limit - 1) >> shift_ >= kBuckets; ++shift_) continue;
    buckets_ = size_t((a.limit - 1) >> shift_) + 1;
    counts_.assign(parts() * buckets_, 0);
    parallel_for(int64_t(parts()), threads, [&](int64_t part) {
      uint32_t* counts = counts_.data() + size_t(part) * buckets_;
      const int shift = shift_;
      each_run(part, [&](const int64_t* rows, int64_t count, int64_t) {
        for (int64_t i = 0; i < count; ++i) ++counts[rows[i] >> shift];
      });
    });
    cut(most);
    turn();
    share_out();
    last_ = 0;
  }

  // Deals the next windows, as many as there is room for; false behind the last. In a window, entries are in the order
  // of positions, and own rows behind all others.
  bool deal() {
    first_ = last_;
    if (first_ == windows_.size()) return false;
    do {
      ++last_;
    } while (last_ < windows_.size() && windows_[last_].begin > 0);
    const size_t count = size_t(windows_[last_ - 1].end);
    entries_ = (Named*)entry_room_.room(count * sizeof(Named));
    slopes_ = (Real*)slope_room_.room(count * size_t(a_->group) * sizeof(Real));
    parallel_for(int64_t(parts()), threads_,
                 [&](int64_t part) { a_->group == 1 ? put<true>(part) : put<false>(part); });
    return true;
  }

  // Those that were dealt, and what they have.
  int64_t count() const { return int64_t(last_ - first_); }
  const Window& operator[](int64_t i) const { return windows_[first_ + size_t(i)]; }
  const Named* entries() const { return entries_; }
  const Real* slopes() const { return slopes_; }

 private:
  static constexpr int64_t kBuckets = int64_t(1) << 15;
  static constexpr int64_t kMostRows = 8192;                // of a window
  static constexpr int64_t kMostDealt = int64_t(32) << 20;  // bytes of slopes; more of them take several turns

  // Positions of each thread, and own rows.
  size_t parts() const { return size_t(threads_) + 1; }
  bool is_own(int64_t part) const { return part == threads_; }

  // run(rows, count, position) for the entries of a part, in their order.
  template <typename Run>
  TURBOGR_INLINE void each_run(int64_t part, Run run) const {
    const TableGradientArguments& a = *a_;
    if (is_own(part)) {
      if (a.own_ids != nullptr) run(a.own_ids, a.positions, 0);
      return;
    }
    const int64_t end = (part + 1) * a.positions / threads_;
    for (int64_t t = part * a.positions / threads_; t < end; ++t) run(a.ids + t * a.each, a.each, t);
  }

  void cut(int64_t most) {
    windows_.clear();
    window_of_.resize(buckets_);
    int64_t room = 0;  // buckets that still go into the window
    for (size_t bucket = 0; bucket < buckets_; ++bucket) {
      int64_t count = 0;
      for (size_t part = 0; part < parts(); ++part) count += counts_[part * buckets_ + bucket];
      const int64_t row = int64_t(bucket) << shift_;
      if (room-- == 0 || windows_.back().end + count > most) {
        windows_.push_back({row, 0, 0, 0});
        room = std::max<int64_t>(0, (kMostRows >> shift_) - 1);
      }
      windows_.back().last = std::min(a_->limit, row + (int64_t(1) << shift_));
      windows_.back().end += count;
      window_of_[bucket] = uint16_t(windows_.size() - 1);
    }
  }

  // Windows of one turn lie behind each other.
  void turn() {
    const int64_t most = kMostDealt / int64_t(sizeof(Real)) / a_->group;
    int64_t begin = 0;
    for (Window& window : windows_) {
      if (begin + window.end > most) begin = 0;
      window.begin = begin;
      begin = window.end += begin;
    }
  }

  // In a window, parts lie behind each other.
  void share_out() {
    const size_t windows = windows_.size();
    next_.assign(parts() * windows, 0);
    for (size_t part = 0; part < parts(); ++part)
      for (size_t bucket = 0; bucket < buckets_; ++bucket)
        next_[part * windows + window_of_[bucket]] += counts_[part * buckets_ + bucket];
    for (size_t w = 0; w < windows; ++w) {
      int64_t at = windows_[w].begin;
      for (size_t part = 0; part < parts(); ++part) at += std::exchange(next_[part * windows + w], at);
    }
  }

  template <bool kOne>
  void put(int64_t part) {
    const TableGradientArguments& a = *a_;
    const int64_t group = kOne ? 1 : a.group;
    const uint32_t first = uint32_t(first_), some = uint32_t(last_ - first_);
    const bool own = is_own(part);
    int64_t* next = next_.data() + size_t(part) * windows_.size();
    const uint16_t* window_of = window_of_.data();
    Named* entries = entries_;
    Real* slopes = slopes_;
    const int shift = shift_;
    each_run(part, [&](const int64_t* rows, int64_t count, int64_t t) {
      const Real* from = own ? a.own_slopes : a.slopes + t * a.each * group;
      const uint32_t query = uint32_t(t / group * group);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t window = window_of[rows[i] >> shift];
        if (window - first >= some) continue;
        const int64_t at = next[window]++;
        entries[at] = {uint32_t(rows[i]), own ? uint32_t(i) | (kOne ? 0 : kOwn) : query};
        Real* to = slopes + at * group;
        if (kOne || own) {
          *to = from[i];
        } else {
          across(group, [&](int64_t c, auto cut) { store_lanes(to + c, load_lanes(from + i * group + c, cut), cut); });
        }
      }
    });
  }

  const TableGradientArguments* a_ = nullptr;
  int64_t threads_ = 0;
  int shift_ = 0;  // from rows to buckets
  size_t buckets_ = 0;
  std::vector<uint32_t> counts_;     // parts x buckets
  std::vector<uint16_t> window_of_;  // buckets
  std::vector<Window> windows_;
  size_t first_ = 0, last_ = 0;  // of windows that were dealt
  std::vector<int64_t> next_;    // parts x windows: where the next entry goes
  Scratch entry_room_, slope_room_;
  Named* entries_ = nullptr;
  Real* slopes_ = nullptr;
};

}  // namespace turbogr
