// Backward of jagged attention: scores are computed anew, block by block; keys outside, queries inside.
#include "attention.h"

namespace turbogr {
namespace {

constexpr int kBackwardKeys = 96;  // columns of a block of scores; a multiple of kTall

// Scores become weights, gradients of weights become gradients of scores.
template <typename Pointwise>
TURBOGR_INLINE void pointwise_row(Pointwise activation, const Head& head, Index query, const Rows& keys,
                                  const Panel* panels, Span span, Real* p, Real* ds) {
  head.for_span(query, keys, panels, span, [&](int64_t j, auto shown) {
    V slope;
    const V weight = activation.weight(load(p + j), &slope);
    store(p + j, where(shown, weight, V{}));
    store(ds + j, where(shown, load(ds + j) * slope, V{}));
  });
}

TURBOGR_APART void rare_row(int64_t activation, const Head& head, Index query, const Rows& keys, const Panel* panels,
                            Span span, Real* p, Real* ds) {
  if (activation == kSigmoid)
    pointwise_row(Sigmoid{}, head, query, keys, panels, span, p, ds);
  else if (activation == kLinear)
    pointwise_row(Linear{}, head, query, keys, panels, span, p, ds);
  else
    pointwise_row(SquaredRelu{}, head, query, keys, panels, span, p, ds);
}

// Scores become capped ones; what is left of a step in a score, 1 - tanh², is kept for `uncap_row`.
TURBOGR_APART void cap_row(Real cap, int64_t width, Real* p, Real* slack) {
  cap_scores(cap, width, p, [&](int64_t j, V share) { store(slack + j, Real(1) - share * share); });
}

// Gradients of capped scores become those of products.
TURBOGR_APART void uncap_row(int64_t width, const Real* slack, Real* ds) {
  for (int64_t j = 0; j < width; j += kLane) store(ds + j, load(ds + j) * load(slack + j));
}

void softmax_row(const Head& head, Index query, const Rows& keys, const Panel* panels, Span span, Real* p, Real* ds,
                 Real log_sum, Real mean) {
  head.for_span(query, keys, panels, span, [&](int64_t j, auto shown) {
    const V weight = exp_or_zero(load(p + j) - log_sum);
    store(p + j, where(shown, weight, V{}));
    store(ds + j, where(shown, weight * (load(ds + j) - mean), V{}));
  });
}

// Sums of one task that meet those of others: they are added up afterwards, in the order of tasks.
struct Shared {
  std::unique_ptr<Real[]> query;      // (members, queries of the sequence, depth), where the sequence has other parts
  std::unique_ptr<Real[]> position;   // (members, distances), reversed
  std::unique_ptr<Real[]> time;       // (members, entries)
  int64_t lowest = 0, distances = 0;  // key column - query column of the first entry of `position`; their number
};

template <typename S>
class Backward {
 public:
  void run(const AttentionArguments& a, const Task& task, bool alone, Shared& shared) {
    const Piece& part = task.part;
    const int64_t members = a.heads / a.groups;
    collect(a, part);
    arrange(a, task);
    const int64_t queries = part.last_query - part.first_query;
    if (!alone && a.query_grad) shared.query.reset(new Real[size_t(members * queries * a.depth)]());
    share_biases(a, members, shared);
    for (int64_t m = 0; m < members; ++m) {
      const int64_t h = task.group * members + m;
      head_.begin(a, part.sequence, h);
      begin_head(a, h);
      for (int64_t at = 0; at < wide_; at += kBackwardKeys)
        for (int64_t first = 0; first < rows_.count(); first += kQueries) block(a, first, at, shared, m);
      if (a.query_grad) finish_queries(a, part, h, alone ? nullptr : shared.query.get() + m * queries * a.depth);
    }
    finish_keys(a, part, task.group);
  }

 private:
  // Keys that some query sees, and queries that some key is seen by.
  void collect(const AttentionArguments& a, const Piece& part) {
    const auto [low, high] = std::minmax_element(a.query_columns + part.first_query, a.query_columns + part.last_query);
    collect_keys(a, part, Index(*low), Index(*high), keys_, panels_);
    head_.keys_ascend = a.key_times && ascending(keys_.time);
    rows_.clear();
    if (panels_.empty()) return;
    const auto lowest = [](const Panel& x, const Panel& y) { return x.low < y.low; };
    const auto highest = [](const Panel& x, const Panel& y) { return x.high < y.high; };
    const Panel all{std::min_element(panels_.begin(), panels_.end(), lowest)->low,
                    std::max_element(panels_.begin(), panels_.end(), highest)->high, false, false};
    head_.begin(a, part.sequence, 0);
    for (int64_t i = part.first_query; i < part.last_query; ++i) {
      const Index column = Index(a.query_columns[i]);
      if (head_.sees(column, column, all)) add_query(a, i, rows_);
    }
  }

  // Room for all operands, and the ones that heads of a group share.
  void arrange(const AttentionArguments& a, const Task& task) {
    wide_ = up(keys_.count(), kWide);
    key_rows_ = up(wide_, kTall);
    query_rows_ = up(rows_.count(), kTall);
    depth_ = up(a.depth, kWide);
    value_depth_ = up(a.value_depth, kWide);
    Real* room =
        (Real*)scratch_.room(size_t(query_rows_ * (2 * depth_ + value_depth_ + 2) +
                                    key_rows_ * (3 * depth_ + 2 * value_depth_) + 2 * kQueries * kBackwardKeys) *
                             sizeof(Real));
    auto take = [&](int64_t count) {
      Real* taken = room;
      room += count;
      return taken;
    };
    queries_ = take(query_rows_ * depth_);
    query_grads_ = take(query_rows_ * depth_);
    grads_ = take(query_rows_ * value_depth_);
    keys_panels_ = take(key_rows_ * depth_);
    keys_transposed_ = take(key_rows_ * depth_);
    key_grads_ = take(key_rows_ * depth_);
    values_transposed_ = take(key_rows_ * value_depth_);
    value_grads_ = take(key_rows_ * value_depth_);
    scores_ = take(kQueries * kBackwardKeys);
    slopes_ = take(kQueries * kBackwardKeys);
    log_sum_ = take(query_rows_);
    mean_ = take(query_rows_);
    const auto key = addresses<S>(a.key, a.key_stride, keys_, task.group);
    const auto value = addresses<S>(a.value, a.value_stride, keys_, task.group);
    pack_panels<S>(key, keys_.count(), key_rows_, a.depth, Real(1), keys_panels_);
    pack_transposed<S>(key, keys_.count(), a.depth, keys_transposed_);
    pack_transposed<S>(value, keys_.count(), a.value_depth, values_transposed_);
    std::fill(key_grads_, key_grads_ + key_rows_ * depth_, Real(0));
    std::fill(value_grads_, value_grads_ + key_rows_ * value_depth_, Real(0));
    low_.resize(size_t(query_rows_ / kTall));
    high_.resize(size_t(query_rows_ / kTall));
    for (int64_t r = 0; r < rows_.count(); r += kTall) {
      const auto [low, high] =
          std::minmax_element(rows_.column.begin() + r, rows_.column.begin() + std::min(r + kTall, rows_.count()));
      low_[size_t(r / kTall)] = *low;
      high_[size_t(r / kTall)] = *high;
    }
  }

  void share_biases(const AttentionArguments& a, int64_t members, Shared& shared) {
    if (a.time_grad) shared.time.reset(new Real[size_t(members * a.time_entries)]());
    if (!a.position_grad || !keys_.count() || !rows_.count()) return;
    const auto [query_low, query_high] = std::minmax_element(rows_.column.begin(), rows_.column.end());
    const auto [key_low, key_high] = std::minmax_element(keys_.column.begin(), keys_.column.begin() + keys_.count());
    shared.lowest = *key_low - *query_high;
    shared.distances = *key_high - *query_low - shared.lowest + 1;
    shared.position.reset(new Real[size_t(members * shared.distances)]());
  }

  void begin_head(const AttentionArguments& a, int64_t h) {
    const auto grad = addresses<S>(a.grad, a.grad_stride, rows_, h);
    const auto query = addresses<S>(a.query, a.query_stride, rows_, h);
    pack_panels<S>(query, rows_.count(), query_rows_, a.depth, Real(a.scale), queries_);
    pack_panels<S>(grad, rows_.count(), query_rows_, a.value_depth, gain(a), grads_);
    std::fill(query_grads_, query_grads_ + query_rows_ * depth_, Real(0));
    if (!a.softmax()) return;
    // The mean of a row's weight gradients, weighted by the weights: the product of result and gradient.
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const int64_t row = rows_.row[size_t(i)] * a.heads + h;
      mean_[i] = inner((const S*)a.result + row * a.value_depth, grad(i), a.value_depth);
      log_sum_[i] = a.log_sum[row];
    }
  }

  // One block of scores and all it contributes to.
  void block(const AttentionArguments& a, int64_t first, int64_t at, Shared& shared, int64_t member) {
    const int64_t count = std::min(kQueries, rows_.count() - first), tall = up(count, kTall);
    const int64_t keys = std::min<int64_t>(wide_ - at, kBackwardKeys), first_panel = at / kWide;
    Span spans[kQueries / kTall];
    bool any = false;
    for (int64_t r = 0; r < tall; r += kTall) {
      const size_t group = size_t((first + r) / kTall);
      spans[r / kTall] =
          seen(head_, low_[group], high_[group], keys_, panels_.data(), first_panel, (at + keys) / kWide);
      any |= !spans[r / kTall].empty();
    }
    if (!any) return;
    for (int64_t panel = first_panel; panel < (at + keys) / kWide; ++panel)
      for (int64_t r = 0; r < tall; r += kTall) tile(a, first, r, panel, panel * kWide - at, spans[r / kTall]);
    for (int64_t r = 0; r < count; ++r)
      if (!spans[r / kTall].empty()) activate(a, first, r, spans[r / kTall], at, shared, member);
    contribute(a, first, tall, at, keys, spans);
  }

  // Scores, and gradients of weights. What no row of the group sees is zero: other products pass over it.
  void tile(const AttentionArguments& a, int64_t first, int64_t r, int64_t panel, int64_t column, Span span) {
    Real *p = scores_ + r * kBackwardKeys + column, *ds = slopes_ + r * kBackwardKeys + column;
    if (!span.holds(panel)) {
      for (int m = 0; m < kTall; ++m) {
        std::fill(p + m * kBackwardKeys, p + m * kBackwardKeys + kWide, Real(0));
        std::fill(ds + m * kBackwardKeys, ds + m * kBackwardKeys + kWide, Real(0));
      }
      return;
    }
    score_tile<kBackwardKeys>(a.depth, queries_ + (first + r) * kWide, query_rows_ * kWide,
                              keys_transposed_ + panel * a.depth * kWide, p);
    if (a.depth == 0 && !head_.has_bias_gradient()) return;  // weights that were given: nobody asks for their gradient
    score_tile<kBackwardKeys>(a.value_depth, grads_ + (first + r) * kWide, query_rows_ * kWide,
                              values_transposed_ + panel * a.value_depth * kWide, ds);
  }

  void activate(const AttentionArguments& a, int64_t first, int64_t r, Span span, int64_t at, Shared& shared,
                int64_t member) {
    const int64_t begin = span.begin(), width = span.width();
    const Index query = rows_.column[size_t(first + r)];
    Real *p = scores_ + r * kBackwardKeys + begin - at, *ds = slopes_ + r * kBackwardKeys + begin - at;
    const bool capped = __builtin_expect(a.score_cap > 0, 0);
    if (capped) cap_row(Real(a.score_cap), width, p, slack_);
    if (head_.biased()) head_.add_biases(rows_, first + r, keys_, panels_.data(), begin, width, p);
    if (a.dropping) {
      head_.kept(query, keys_, begin, width, keep_);
      for (int64_t j = 0; j < width; ++j) ds[j] *= keep_[j];
    }
    if (a.softmax())
      softmax_row(head_, query, keys_, panels_.data(), span, p, ds, log_sum_[first + r], mean_[first + r]);
    else if (a.activation == kSilu)
      pointwise_row(Silu{}, head_, query, keys_, panels_.data(), span, p, ds);
    else
      rare_row(a.activation, head_, query, keys_, panels_.data(), span, p, ds);
    if (a.dropping)
      for (int64_t j = 0; j < width; ++j) p[j] *= keep_[j];
    if (head_.has_bias_gradient())
      head_.add_bias_gradients(
          rows_, first + r, keys_, panels_.data(), begin, width, ds,
          a.position_grad ? &shared.position[size_t(member * shared.distances)] - shared.lowest : nullptr,
          a.time_grad ? &shared.time[size_t(member * a.time_entries)] : nullptr);
    if (capped) uncap_row(width, slack_, ds);
  }

  // Products of weights and slopes with rows of the block.
  void contribute(const AttentionArguments& a, int64_t first, int64_t tall, int64_t at, int64_t keys,
                  const Span* spans) {
    const int64_t present = std::min(keys, keys_.count() - at);
    for (int64_t j = 0; j < present; j += kTall) {
      // Rows that see one of these keys; tiles in between are zero.
      int64_t begin = 0, end = tall;
      const auto sees = [&](int64_t r) {
        return spans[r / kTall].first_key < at + j + kTall && spans[r / kTall].last_key > at + j;
      };
      while (begin < end && !sees(begin)) begin += kTall;
      while (begin < end && !sees(end - kTall)) end -= kTall;
      if (begin == end) continue;
      for (int64_t c = 0; c < value_depth_; c += kWide)
        add_tile<1, kBackwardKeys>(end - begin, scores_ + begin * kBackwardKeys + j,
                                   grads_ + c * query_rows_ + (first + begin) * kWide,
                                   value_grads_ + c * key_rows_ + (at + j) * kWide);
      for (int64_t c = 0; c < depth_; c += kWide)
        add_tile<1, kBackwardKeys>(end - begin, slopes_ + begin * kBackwardKeys + j,
                                   queries_ + c * query_rows_ + (first + begin) * kWide,
                                   key_grads_ + c * key_rows_ + (at + j) * kWide);
    }
    if (!a.query_grad) return;
    for (int64_t r = 0; r < tall; r += kTall) {
      const Span span = spans[r / kTall];
      if (span.empty()) continue;
      for (int64_t c = 0; c < depth_; c += kWide)
        add_tile<kBackwardKeys, 1>(span.last_key - span.first_key, slopes_ + r * kBackwardKeys + span.first_key - at,
                                   keys_panels_ + c * key_rows_ + span.first_key * kWide,
                                   query_grads_ + c * query_rows_ + (first + r) * kWide);
    }
  }

  void finish_queries(const AttentionArguments& a, const Piece& part, int64_t h, Real* partial) {
    for_rows(rows_, part.first_query, part.last_query, [&](int64_t row, int64_t packed) {
      S* to = (S*)a.query_grad + (row * a.heads + h) * a.depth;
      if (partial)
        unpack(query_grads_, query_rows_, packed, a.depth, Real(a.scale), partial + (row - part.first_query) * a.depth);
      else
        unpack(query_grads_, query_rows_, packed, a.depth, Real(a.scale), to);
    });
  }

  void finish_keys(const AttentionArguments& a, const Piece& part, int64_t group) {
    for_rows(keys_, part.first_key, part.last_key, [&](int64_t row, int64_t packed) {
      const int64_t to = row * a.groups + group;
      if (a.key_grad) unpack(key_grads_, key_rows_, packed, a.depth, Real(1), (S*)a.key_grad + to * a.depth);
      if (a.value_grad)
        unpack(value_grads_, key_rows_, packed, a.value_depth, Real(1), (S*)a.value_grad + to * a.value_depth);
    });
  }

  // body(row, where it is packed), or -1 for rows that were left out.
  template <typename Body>
  void for_rows(const Rows& rows, int64_t first, int64_t last, Body body) {
    int64_t packed = 0;
    for (int64_t row = first; row < last; ++row) {
      const bool present = packed < rows.count() && rows.row[size_t(packed)] == row;
      body(row, present ? packed++ : -1);
    }
  }

  template <typename To>
  static void unpack(const Real* panels, int64_t rows, int64_t packed, int64_t depth, Real factor, To* to) {
    if (packed >= 0)
      unpack_row(panels, rows, packed, depth, factor, to);
    else
      std::fill(to, to + depth, To{});
  }

  Rows keys_, rows_;
  std::vector<Panel> panels_;
  std::vector<Index> low_, high_;  // columns of each kTall queries
  Head head_;
  Scratch scratch_;
  int64_t wide_, key_rows_, query_rows_, depth_, value_depth_;
  Real *queries_, *query_grads_, *grads_, *keys_panels_, *keys_transposed_, *key_grads_;
  Real *values_transposed_, *value_grads_, *scores_, *slopes_, *log_sum_, *mean_;
  Real keep_[kBackwardKeys];
  Real slack_[kBackwardKeys];  // of capped scores: see cap_row
};

// Tasks that add into the same dense bias run one after another, in order; all others are free.
std::vector<std::vector<int64_t>> chains(const AttentionArguments& a, const std::vector<Task>& tasks) {
  std::vector<std::vector<int64_t>> chains;
  if (!a.bias_grad) {
    for (size_t i = 0; i < tasks.size(); ++i) chains.push_back({int64_t(i)});
    return chains;
  }
  const bool by_sequence = a.bias_grad_stride[0] != 0, by_head = a.bias_grad_stride[1] != 0;
  chains.resize(size_t((by_sequence ? a.sequences : 1) * (by_head ? a.groups : 1)));
  for (size_t i = 0; i < tasks.size(); ++i) {
    const int64_t sequence = by_sequence ? tasks[i].part.sequence : 0, group = by_head ? tasks[i].group : 0;
    chains[size_t(sequence * (by_head ? a.groups : 1) + group)].push_back(int64_t(i));
  }
  return chains;
}

template <typename S>
void add_query_parts(const AttentionArguments& a, const std::vector<Task>& tasks, const std::vector<Shared>& shared) {
  std::vector<std::vector<int64_t>> parts(size_t(a.sequences * a.groups));
  for (size_t i = 0; i < tasks.size(); ++i)
    if (shared[i].query) parts[size_t(tasks[i].part.sequence * a.groups + tasks[i].group)].push_back(int64_t(i));
  const int64_t members = a.heads / a.groups;
  parallel_for(int64_t(parts.size()), a.threads, [&](int64_t p) {
    std::vector<int64_t>& mine = parts[size_t(p)];
    if (mine.empty()) return;
    std::sort(mine.begin(), mine.end(),
              [&](int64_t x, int64_t y) { return tasks[size_t(x)].part.first_key < tasks[size_t(y)].part.first_key; });
    const Piece& part = tasks[size_t(mine[0])].part;
    const int64_t queries = part.last_query - part.first_query;
    std::vector<Real> total(size_t(a.depth));
    for (int64_t m = 0; m < members; ++m)
      for (int64_t i = 0; i < queries; ++i) {
        std::fill(total.begin(), total.end(), Real(0));
        for (int64_t task : mine) {
          const Real* from = shared[size_t(task)].query.get() + (m * queries + i) * a.depth;
          for (int64_t k = 0; k < a.depth; ++k) total[size_t(k)] += from[k];
        }
        const int64_t head = tasks[size_t(mine[0])].group * members + m;
        narrow_row(total.data(), (S*)a.query_grad + ((part.first_query + i) * a.heads + head) * a.depth, a.depth);
      }
  });
}

// In the order of tasks, which is that of the batch and not of threads.
void add_tables(const AttentionArguments& a, const std::vector<Task>& tasks, const std::vector<Shared>& shared) {
  const int64_t members = a.heads / a.groups, zero = zero_distance(a);
  for (size_t i = 0; i < tasks.size(); ++i)
    for (int64_t m = 0; m < members; ++m) {
      const Shared& from = shared[i];
      const int64_t head = tasks[i].group * members + m;
      if (from.position) {
        Real* table = a.position_grad + head * a.position_stride + zero - from.lowest;
        const Real* sums = from.position.get() + m * from.distances;
        for (int64_t d = 0; d < from.distances; ++d) table[-d] += sums[d];
      }
      if (from.time) {
        Real* table = a.time_grad + head * a.time_stride;
        for (int64_t e = 0; e < a.time_entries; ++e) table[e] += from.time[size_t(m * a.time_entries + e)];
      }
    }
}

// A row's share of its sink is exp(sink - log_sum). The sink's value is zero, and so is the gradient of that share: what
// is left of softmax's derivative is the mean. Sequences are added up in their order, whoever computes them.
template <typename S>
void add_sinks(const AttentionArguments& a) {
  std::vector<double> sums(size_t(a.sequences * a.heads));
  parallel_for(a.sequences, a.threads, [&](int64_t s) {
    double* own = sums.data() + s * a.heads;
    for (int64_t row = a.query_offsets[s]; row < a.query_offsets[s + 1]; ++row)
      for (int64_t h = 0; h < a.heads; ++h) {
        const S* grad = (const S*)a.grad + row * a.grad_stride[0] + h * a.grad_stride[1];
        const S* result = (const S*)a.result + (row * a.heads + h) * a.value_depth;
        own[h] -= std::exp(a.sink[h] - a.log_sum[row * a.heads + h]) * inner(result, grad, a.value_depth);
      }
  });
  std::vector<double> totals(size_t(a.heads));
  for (size_t i = 0; i < sums.size(); ++i) totals[i % totals.size()] += sums[i];
  std::copy(totals.begin(), totals.end(), a.sink_grad);
}

template <typename S>
void backward(const AttentionArguments& a) {
  const std::vector<Task> tasks = plan_attention(a, false);
  if (a.query_grad) fill_idle<S>(a, a.query_offsets, a.key_offsets, a.query_rows, a.heads * a.depth, a.query_grad);
  if (a.key_grad) fill_idle<S>(a, a.key_offsets, a.query_offsets, a.key_rows, a.groups * a.depth, a.key_grad);
  if (a.value_grad) fill_idle<S>(a, a.key_offsets, a.query_offsets, a.key_rows, a.groups * a.value_depth, a.value_grad);
  std::vector<Shared> shared(tasks.size());
  const auto order = chains(a, tasks);
  parallel_for(int64_t(order.size()), a.threads, [&](int64_t c) {
    Backward<S>& worker = own<Backward<S>>();
    for (int64_t i : order[size_t(c)]) {
      const Piece& part = tasks[size_t(i)].part;
      const bool alone =
          part.first_key == a.key_offsets[part.sequence] && part.last_key == a.key_offsets[part.sequence + 1];
      worker.run(a, tasks[size_t(i)], alone, shared[size_t(i)]);
    }
  });
  if (a.query_grad) add_query_parts<S>(a, tasks, shared);
  if (a.position_grad || a.time_grad) add_tables(a, tasks, shared);
  if (a.sink_grad) add_sinks<S>(a);
}

}  // namespace
}  // namespace turbogr

extern "C" const char* turbogr_jagged_attention_backward(const turbogr::AttentionArguments* a) {
  return turbogr::guarded([&]() -> const char* {
    using namespace turbogr;
    if (!with_storage(a->type, [&](auto* s) { backward<std::remove_pointer_t<decltype(s)>>(*a); }))
      return failure("jagged_attention: this library does not compute in the dtype of query");
    return nullptr;
  });
}
