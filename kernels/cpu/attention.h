// What forward and backward of jagged attention share: arguments, the keys a block of queries sees, terms of the score.
//
// Meaning of every argument: kernels/jagged_attention.py. Invalid keys are left out when keys are packed, so nothing
// below knows of them; whether a pair is visible is then a matter of columns, and of the pair mask where there is one.
#pragma once

#include <limits>
#include <vector>

#include "panels.h"
#include "threads.h"

namespace turbogr {

enum Activation : int64_t { kSoftmax, kSilu, kSigmoid, kSquaredRelu, kLinear };

struct AttentionArguments {
  const void *query, *key, *value;
  const int64_t *query_offsets, *key_offsets, *query_columns, *key_columns;
  const uint8_t *key_valid, *pair_mask;
  const Real *bias, *position_bias, *time_bias, *sink;
  const int64_t *time_bounds, *query_times, *key_times;
  void* result;
  Real* log_sum;
  const void* grad;
  void *query_grad, *key_grad, *value_grad;
  Real *bias_grad, *position_grad, *time_grad, *sink_grad;
  int64_t type, threads, sequences, query_rows, key_rows, heads, groups, depth, value_depth;
  int64_t query_stride[2], key_stride[2], value_stride[2], grad_stride[2];  // from row to row, from head to head
  int64_t mask_stride[4], mask_size[2], bias_stride[4], bias_size[2], bias_grad_stride[4];
  int64_t position_entries, position_stride, time_entries, time_stride;  // stride 0: one table for all heads
  int64_t activation, min_distance, max_distance, dropping, seed;
  double scale, post_scale, dropout, score_cap;  // a cap of 0: none

  bool softmax() const { return activation == kSoftmax; }
};

using Index = Bits<Real>;  // columns, in lanes as wide as scores
using VIndex = Vector<Index>;

constexpr int64_t kColumns = int64_t(1) << 29;   // columns are below; distances of two fit into 30 bits
constexpr Index kNobody = -3 * Index(kColumns);  // the column of keys that only fill up a panel: nobody sees it
constexpr int64_t kQueries = 96;                 // rows of a block of scores; a multiple of every kTall

// Rows of one side of one sequence, in the order they are packed.
struct Rows {
  std::vector<int64_t> row;  // in the tensor
  std::vector<Index> column;
  std::vector<int64_t> time;

  int64_t count() const { return int64_t(row.size()); }
  void clear() {
    row.clear();
    column.clear();
    time.clear();
  }
};

// Addresses of one head's rows, from the `first` on.
template <typename S>
auto addresses(const void* tensor, const int64_t (&stride)[2], const Rows& rows, int64_t head, int64_t first = 0) {
  const S* start = (const S*)tensor + head * stride[1];
  const int64_t *row = rows.row.data() + first, step = stride[0];
  return [=](int64_t i) { return start + row[i] * step; };
}

// Columns of kWide keys that lie beside each other.
struct Panel {
  Index low, high;   // of its keys
  bool whole;        // no key is missing
  bool consecutive;  // columns ascend by one
};

// What some row of a group sees: panels [first, last), and in those keys [first_key, last_key). Empty when nothing.
struct Span {
  int64_t first = 0, last = 0, first_key = 0, last_key = 0;

  bool empty() const { return first_key >= last_key; }
  int64_t begin() const { return first * kWide; }
  int64_t width() const { return (last - first) * kWide; }
  bool holds(int64_t panel) const { return first <= panel && panel < last; }
};

// Stands for a mask where nothing is hidden.
struct Everything {};
TURBOGR_INLINE V where(Everything, V x, V) { return x; }
TURBOGR_INLINE V where(VIndex shown, V x, V other) { return shown ? x : other; }

// Activations that look at one score at a time: the weight, and where it is asked for its derivative.
struct Silu {
  TURBOGR_INLINE V weight(V score) const { return score / (Real(1) + exp_minus(score)); }
  TURBOGR_INLINE V weight(V score, V* slope) const {
    const V gate = Real(1) / (Real(1) + exp_minus(score)), weight = score * gate;
    *slope = gate + weight * (Real(1) - gate);
    return weight;
  }
};

struct Sigmoid {
  TURBOGR_INLINE V weight(V score) const { return Real(1) / (Real(1) + exp_minus(score)); }
  TURBOGR_INLINE V weight(V score, V* slope) const {
    const V gate = Real(1) / (Real(1) + exp_minus(score));
    *slope = gate * (Real(1) - gate);
    return gate;
  }
};

struct SquaredRelu {
  TURBOGR_INLINE V weight(V score) const {
    const V above = larger(V{}, score);
    return above * above;
  }
  TURBOGR_INLINE V weight(V score, V* slope) const {
    const V above = larger(V{}, score);
    *slope = above + above;
    return above * above;
  }
};

struct Linear {
  TURBOGR_INLINE V weight(V score) const { return score; }
  TURBOGR_INLINE V weight(V score, V* slope) const {
    *slope = V{} + Real(1);
    return score;
  }
};

// Scores become cap · tanh(score / cap); each(j, tanh) for each vector of them.
template <typename Each>
TURBOGR_INLINE void cap_scores(Real cap, int64_t count, Real* scores, Each each) {
  const Real inverse = Real(1) / cap;
  for (int64_t j = 0; j < count; j += kLane) {
    const V share = tanh(load(scores + j) * inverse);
    store(scores + j, share * cap);
    each(j, share);
  }
}

// A sequence's part of a batch, or a range of it.
struct Piece {
  int64_t sequence, first_query, last_query, first_key, last_key;
};

// Where the entry of distance 0 lies in a table of position biases.
inline int64_t zero_distance(const AttentionArguments& a) { return (a.position_entries - 1) / 2; }

// What follows the activation: a constant factor, and what makes up for dropped pairs.
inline Real gain(const AttentionArguments& a) {
  if (!a.dropping) return Real(a.post_scale);
  return a.dropout < 1 ? Real(a.post_scale / (1 - a.dropout)) : Real(0);
}

inline int64_t clamp_distance(int64_t x) { return std::max(-2 * kColumns, std::min(2 * kColumns, x)); }

// Buckets of time gaps: entry e holds gaps in [bound[e - 1], bound[e]).
class Buckets {
 public:
  Buckets(const int64_t* bounds, int64_t entries) : bounds_(bounds), entries_(entries) {}

  int64_t entry() const { return entry_; }
  bool holds(int64_t gap) const { return gap >= low_ && gap < high_; }

  // Finds the entry of a gap, and the range of gaps that share it.
  void seek(int64_t gap) {
    entry_ = std::upper_bound(bounds_, bounds_ + entries_ - 1, gap) - bounds_;
    low_ = entry_ > 0 ? bounds_[entry_ - 1] : std::numeric_limits<int64_t>::min();
    high_ = entry_ < entries_ - 1 ? bounds_[entry_] : std::numeric_limits<int64_t>::max();
  }

 private:
  const int64_t* bounds_;
  int64_t entries_, entry_ = 0, low_ = 0, high_ = 0;  // an empty range: the first question seeks
};

// As torch computes it: a difference that does not fit wraps around.
inline int64_t gap_between(int64_t a, int64_t b) {
  const uint64_t gap = uint64_t(a) - uint64_t(b);
  return int64_t(int64_t(gap) < 0 ? 0 - gap : gap);
}

inline bool wraps(int64_t a, int64_t b) {
  int64_t difference;
  return __builtin_sub_overflow(a, b, &difference);
}

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x *= 0x735a2d97u;
  return x ^ (x >> 15);
}

// One head of one sequence: which pairs see each other, what is added to their scores, which of them are dropped.
class Head {
 public:
  void begin(const AttentionArguments& a, int64_t sequence, int64_t head) {
    a_ = &a;
    sequence_ = sequence;
    head_ = head;
    low_ = Index(clamp_distance(a.min_distance));
    high_ = Index(clamp_distance(a.max_distance));
    if (a.position_bias) {
      // Reversed, so that the entries of consecutive keys are consecutive too.
      const Real* table = a.position_bias + head * a.position_stride;
      position_.assign(size_t(a.position_entries + kWide), Real(0));
      for (int64_t i = 0; i < a.position_entries; ++i) position_[size_t(a.position_entries - 1 - i)] = table[i];
    }
    if (a.dropping) {
      state_ = mix(0x9e3779b9u ^ uint32_t(a.seed));
      for (int64_t number : {a.seed >> 32, sequence, head}) state_ = mix(state_ ^ uint32_t(number));
      limit_ = uint64_t(std::nearbyint(a.dropout * 4294967296.0));
    }
  }

  bool biased() const { return a_->bias || a_->position_bias || a_->time_bias; }
  bool has_bias_gradient() const { return a_->bias_grad || a_->position_grad || a_->time_grad; }

  bool sees(Index query_low, Index query_high, const Panel& keys) const {
    return query_low - keys.high <= high_ && query_high - keys.low >= low_;
  }

  bool sees_all(Index query, const Panel& keys) const {
    return keys.whole && query - keys.high >= low_ && query - keys.low <= high_ && !a_->pair_mask;
  }

  // Lanes of keys `at` and following that the query sees.
  TURBOGR_INLINE VIndex visible(Index query, const Rows& keys, int64_t at) const {
    const VIndex distance = query - load(keys.column.data() + at);
    VIndex shown = (distance >= low_) & (distance <= high_);
    if (__builtin_expect(a_->pair_mask != nullptr, 0)) shown &= unmasked(query, keys, at);
    return shown;
  }

  // body(offset, shown) for each vector of a span; `shown` is a mask, or nothing where all is visible.
  template <typename Body>
  TURBOGR_INLINE void for_span(Index query, const Rows& keys, const Panel* panels, Span span, Body body) const {
    int64_t panel = span.first;
    while (panel < span.last) {
      int64_t run = panel;
      while (run < span.last && sees_all(query, panels[run])) ++run;
      for (int64_t j = panel * kWide; j < run * kWide; j += kLane) body(j - span.begin(), Everything{});
      for (panel = run; panel < span.last && !sees_all(query, panels[panel]); ++panel)
        for (int64_t j = panel * kWide; j < (panel + 1) * kWide; j += kLane)
          body(j - span.begin(), visible(query, keys, j));
    }
  }

  // Adds every bias to the scores of one query with keys from `at` on.
  void add_biases(const Rows& queries, int64_t i, const Rows& keys, const Panel* panels, int64_t at, int64_t count,
                  Real* scores) const {
    const Index query = queries.column[size_t(i)];
    if (a_->position_bias) add_position(query, keys, panels, at, count, scores);
    if (a_->time_bias) add_time(queries.time[size_t(i)], keys, at, count, scores);
    if (a_->bias) {
      const Real* row = dense_row(a_->bias, a_->bias_stride, query);
      for_keys(keys, at, count, [&](int64_t j, Index column) { scores[j] += row[column * a_->bias_stride[3]]; });
    }
  }

  // Adds gradients of scores into those of the biases: `position` and `time` are sums of the caller's own.
  void add_bias_gradients(const Rows& queries, int64_t i, const Rows& keys, const Panel* panels, int64_t at,
                          int64_t count, const Real* slopes, Real* position, Real* time) const {
    const Index query = queries.column[size_t(i)];
    if (a_->position_grad) add_position_gradient(query, keys, panels, at, count, slopes, position);
    if (a_->time_grad) add_time_gradient(queries.time[size_t(i)], keys, at, count, slopes, time);
    if (a_->bias_grad) {
      Real* row = dense_row(a_->bias_grad, a_->bias_grad_stride, query);
      for_keys(keys, at, count, [&](int64_t j, Index column) { row[column * a_->bias_grad_stride[3]] += slopes[j]; });
    }
  }

  // 1 for pairs that dropout keeps, 0 for the others.
  void kept(Index query, const Rows& keys, int64_t at, int64_t count, Real* keep) const {
    const uint32_t row = mix(uint32_t(query) ^ state_);
    if (limit_ > 0xffffffffu) {
      std::fill(keep, keep + count, Real(0));
      return;
    }
    const uint32_t limit = uint32_t(limit_);
    const Index* column = keys.column.data() + at;
    for (int64_t j = 0; j < count; ++j) keep[j] = Real(mix(row ^ uint32_t(column[j])) >= limit);
  }

 private:
  template <typename Body>
  TURBOGR_INLINE void for_keys(const Rows& keys, int64_t at, int64_t count, Body body) const {
    const Index* column = keys.column.data() + at;
    for (int64_t j = 0; j < count; ++j)
      if (column[j] != kNobody) body(j, column[j]);
  }

  template <typename T>
  T* dense_row(T* table, const int64_t* stride, Index query) const {
    return table + sequence_ * stride[0] + head_ * stride[1] + query * stride[2];
  }

  VIndex unmasked(Index query, const Rows& keys, int64_t at) const {
    const uint8_t* row = dense_row(a_->pair_mask, a_->mask_stride, query);
    VIndex shown{};
    for_keys(keys, at, kLane, [&](int64_t j, Index column) { shown[j] = row[column * a_->mask_stride[3]] ? -1 : 0; });
    return shown;
  }

  void add_position(Index query, const Rows& keys, const Panel* panels, int64_t at, int64_t count, Real* scores) const {
    const Real* zero = position_.data() + zero_distance(*a_) - query;
    for (int64_t j = 0; j < count; j += kLane) {
      const Index* column = keys.column.data() + at + j;
      if (panels[(at + j) / kWide].consecutive) {
        store(scores + j, load(scores + j) + load(zero + column[0]));
      } else {
        for_keys(keys, at + j, kLane, [&](int64_t k, Index key) { scores[j + k] += zero[key]; });
      }
    }
  }

  void add_position_gradient(Index query, const Rows& keys, const Panel* panels, int64_t at, int64_t count,
                             const Real* slopes, Real* sums) const {
    Real* zero = sums - query;
    for (int64_t j = 0; j < count; j += kLane) {
      const Index* column = keys.column.data() + at + j;
      if (panels[(at + j) / kWide].consecutive) {
        Real* entries = zero + column[0];
        store(entries, load(entries) + load(slopes + j));
      } else {
        for_keys(keys, at + j, kLane, [&](int64_t k, Index key) { zero[key] += slopes[j + k]; });
      }
    }
  }

  // Times mostly ascend, so that the keys of a stretch share a bucket when its ends do: gaps between lie between.
  template <typename Stretch, typename One>
  TURBOGR_INLINE void by_bucket(int64_t time, const Rows& keys, int64_t at, int64_t count, Stretch stretch,
                                One one) const {
    Buckets bucket(a_->time_bounds, a_->time_entries);
    const int64_t* times = keys.time.data() + at;
    for (int64_t j = 0; j < count; j += kLane) {
      const int64_t first = times[j], last = times[j + kLane - 1];
      const bool behind = last <= time, ahead = first >= time;
      if (keys_ascend && ((behind && !wraps(time, first)) || (ahead && !wraps(last, time)))) {
        const int64_t gap = gap_between(time, first);
        if (!bucket.holds(gap)) bucket.seek(gap);
        if (bucket.holds(gap_between(time, last))) {
          stretch(j, bucket.entry());
          continue;
        }
      }
      for (int64_t k = j; k < j + kLane; ++k) {
        const int64_t gap = gap_between(time, times[k]);
        if (!bucket.holds(gap)) bucket.seek(gap);
        one(k, bucket.entry());
      }
    }
  }

  void add_time(int64_t time, const Rows& keys, int64_t at, int64_t count, Real* scores) const {
    const Real* table = a_->time_bias + head_ * a_->time_stride;
    by_bucket(
        time, keys, at, count, [&](int64_t j, int64_t entry) { store(scores + j, load(scores + j) + table[entry]); },
        [&](int64_t j, int64_t entry) { scores[j] += table[entry]; });
  }

  void add_time_gradient(int64_t time, const Rows& keys, int64_t at, int64_t count, const Real* slopes,
                         Real* sums) const {
    V total{};
    int64_t current = 0;
    by_bucket(
        time, keys, at, count,
        [&](int64_t j, int64_t entry) {
          if (entry != current) {
            sums[current] += sum<Real>(total);
            total = V{};
            current = entry;
          }
          total += load(slopes + j);
        },
        [&](int64_t j, int64_t entry) { sums[entry] += slopes[j]; });
    sums[current] += sum<Real>(total);
  }

 public:
  bool keys_ascend = false;  // in time

 private:
  const AttentionArguments* a_ = nullptr;
  int64_t sequence_ = 0, head_ = 0;
  Index low_ = 0, high_ = 0;
  uint32_t state_ = 0;
  uint64_t limit_ = 0;
  std::vector<Real> position_;
};

// Keys of a part that can be seen by queries of columns `low` to `high`, filled up to whole panels.
inline void collect_keys(const AttentionArguments& a, const Piece& part, Index low, Index high, Rows& keys,
                         std::vector<Panel>& panels) {
  const int64_t least = clamp_distance(a.min_distance), most = clamp_distance(a.max_distance);
  keys.clear();
  panels.clear();
  for (int64_t j = part.first_key; j < part.last_key; ++j) {
    const int64_t column = a.key_columns[j];
    if (a.key_valid && !a.key_valid[j]) continue;
    if (low - column > most || high - column < least) continue;
    keys.row.push_back(j);
    keys.column.push_back(Index(column));
    if (a.key_times) keys.time.push_back(a.key_times[j]);
  }
  const int64_t count = keys.count();
  for (int64_t j = 0; j < count; j += kWide) {
    const int64_t width = std::min<int64_t>(kWide, count - j);
    const Index* column = keys.column.data() + j;
    Panel panel{*std::min_element(column, column + width), *std::max_element(column, column + width), width == kWide,
                width == kWide};
    for (int64_t k = 1; k < width; ++k) panel.consecutive &= column[k] == column[k - 1] + 1;
    panels.push_back(panel);
  }
  keys.column.resize(size_t(up(count, kWide)), kNobody);
  if (a.key_times) keys.time.resize(size_t(up(count, kWide)), count ? keys.time.back() : 0);
}

inline void add_query(const AttentionArguments& a, int64_t row, Rows& queries) {
  queries.row.push_back(row);
  queries.column.push_back(Index(a.query_columns[row]));
  if (a.query_times) queries.time.push_back(a.query_times[row]);
}

inline bool ascending(const std::vector<int64_t>& times) { return std::is_sorted(times.begin(), times.end()); }

inline Span seen(const Head& head, Index low, Index high, const Rows& keys, const Panel* panels, int64_t first,
                 int64_t last) {
  while (first < last && !head.sees(low, high, panels[first])) ++first;
  while (first < last && !head.sees(low, high, panels[last - 1])) --last;
  Span span{first, last, first * kWide, last * kWide};
  const auto sees = [&](int64_t key) {
    const Index column = keys.column[size_t(key)];
    return head.sees(low, high, Panel{column, column, false, false});
  };
  while (!span.empty() && !sees(span.last_key - 1)) --span.last_key;
  while (!span.empty() && !sees(span.first_key)) ++span.first_key;
  return span.empty() ? Span{} : span;  // a panel with holes may promise what no key of it keeps
}

// --- plan ------------------------------------------------------------------------------------------

struct Task {
  Piece part;
  int64_t group;
  double cost;
};

// Rows that no task writes: those of no sequence, and of sequences whose other side is empty.
template <typename S>
void fill_idle(const AttentionArguments& a, const int64_t* offsets, const int64_t* others, int64_t rows, int64_t width,
               void* to, S value = S{}) {
  S* start = (S*)to;
  std::fill(start, start + offsets[0] * width, value);
  for (int64_t s = 0; s < a.sequences; ++s)
    if (others[s] == others[s + 1]) std::fill(start + offsets[s] * width, start + offsets[s + 1] * width, value);
  std::fill(start + offsets[a.sequences] * width, start + rows * width, value);
}

// Parts of about equal work, largest first. A sequence is split (its queries or its keys) when it is a large share of
// the batch: that depends on the batch alone, so sums are the same for any number of threads.
std::vector<Task> plan_attention(const AttentionArguments& a, bool split_queries);

}  // namespace turbogr
