// Forward of jagged attention: blocks of queries against blocks of keys, scores never leave the first caches.
#include "attention.h"

namespace turbogr {
namespace {

constexpr int kForwardKeys = 128;  // columns of a block of scores

// Weights of an activation that looks at one score at a time; hidden pairs have none.
template <typename Pointwise>
TURBOGR_APART void pointwise_row(Pointwise activation, const Head& head, Index query, const Rows& keys,
                                 const Panel* panels, Span span, Real* p) {
  head.for_span(query, keys, panels, span,
                [&](int64_t j, auto shown) { store(p + j, where(shown, activation.weight(load(p + j)), V{})); });
}

TURBOGR_APART void cap_row(Real cap, int64_t width, Real* p) {
  cap_scores(cap, width, p, [](int64_t, V) {});
}

struct Running {
  Real top = -std::numeric_limits<Real>::infinity();  // largest score so far
  Real total = 0;                                     // sum of e^(score - top)
};

// Unscaled weights of softmax. Returns what sums of earlier blocks must be multiplied by.
Real softmax_row(const Head& head, Index query, const Rows& keys, const Panel* panels, Span span, Real* p,
                 Running& running) {
  const V least = broadcast(-std::numeric_limits<Real>::infinity());
  V top = least;
  head.for_span(query, keys, panels, span, [&](int64_t j, auto shown) {
    const V score = where(shown, load(p + j), least);
    if constexpr (!std::is_same_v<decltype(shown), Everything>) store(p + j, score);
    top = larger(score, top);
  });
  const Real before = running.top;
  running.top = std::max(before, maximum<Real>(top));
  if (running.top == -std::numeric_limits<Real>::infinity()) {
    const int64_t width = span.width();
    const Real* nan = std::find_if(p, p + width, [](Real x) { return x != x; });  // maxima pass over NaN
    if (nan == p + width) {
      std::fill(p, p + width, Real(0));
      return 1;
    }
    running.top = *nan;
  }
  V total{};
  for (int64_t j = 0; j < span.width(); j += kLane) {
    const V weight = exp_or_zero(load(p + j) - running.top);
    store(p + j, weight);
    total += weight;
  }
  const Real correction = before == running.top ? Real(1) : std::exp(before - running.top);
  running.total = running.total * correction + sum<Real>(total);
  return correction;
}

template <typename S>
class Forward {
 public:
  void run(const AttentionArguments& a, const Task& task) {
    const Piece& part = task.part;
    const auto [low, high] = std::minmax_element(a.query_columns + part.first_query, a.query_columns + part.last_query);
    collect_keys(a, part, Index(*low), Index(*high), keys_, panels_);
    const int64_t wide = up(keys_.count(), kWide), out = up(a.value_depth, kWide);
    Real* room = (Real*)scratch_.room(
        size_t(wide * a.depth + wide * out + kQueries * (up(a.depth, kWide) + kForwardKeys + out)) * sizeof(Real));
    transposed_ = room;
    values_ = transposed_ + wide * a.depth;
    queries_ = values_ + wide * out;
    scores_ = queries_ + kQueries * up(a.depth, kWide);
    sums_ = scores_ + kQueries * kForwardKeys;
    pack_transposed<S>(addresses<S>(a.key, a.key_stride, keys_, task.group), keys_.count(), a.depth, transposed_);
    pack_panels<S>(addresses<S>(a.value, a.value_stride, keys_, task.group), keys_.count(), wide, a.value_depth,
                   Real(1), values_);
    rows_.clear();
    for (int64_t i = part.first_query; i < part.last_query; ++i) add_query(a, i, rows_);
    head_.keys_ascend = a.key_times && ascending(keys_.time);
    const int64_t members = a.heads / a.groups;
    for (int64_t h = task.group * members; h < (task.group + 1) * members; ++h) {
      head_.begin(a, part.sequence, h);
      for (int64_t i = 0; i < rows_.count(); i += kQueries) block(a, h, i, wide);
    }
  }

 private:
  // Queries `first` and following, against all keys.
  void block(const AttentionArguments& a, int64_t h, int64_t first, int64_t wide) {
    const int64_t count = std::min(kQueries, rows_.count() - first), tall = up(count, kTall);
    const int64_t columns = up(a.value_depth, kWide);
    pack_panels<S>(addresses<S>(a.query, a.query_stride, rows_, h, first), count, tall, a.depth, Real(a.scale),
                   queries_);
    std::fill(sums_, sums_ + tall * columns, Real(0));
    std::fill(running_, running_ + tall, Running{});
    for (int64_t r = 0; r < tall; r += kTall) {
      const auto [low, high] = std::minmax_element(rows_.column.begin() + first + r,
                                                   rows_.column.begin() + first + std::min(r + kTall, count));
      low_[r / kTall] = *low;
      high_[r / kTall] = *high;
    }
    for (int64_t at = 0; at < wide; at += kForwardKeys)
      against(a, first, count, tall, at, std::min<int64_t>(wide - at, kForwardKeys), wide);
    finish(a, h, first, count, tall);
  }

  // One block of scores: products, activation, products.
  void against(const AttentionArguments& a, int64_t first, int64_t count, int64_t tall, int64_t at, int64_t keys,
               int64_t wide) {
    Span spans[kQueries / kTall];
    for (int64_t r = 0; r < tall; r += kTall)
      spans[r / kTall] =
          seen(head_, low_[r / kTall], high_[r / kTall], keys_, panels_.data(), at / kWide, (at + keys) / kWide);
    for (int64_t panel = at / kWide; panel < (at + keys) / kWide; ++panel)
      for (int64_t r = 0; r < tall; r += kTall) {
        const Span span = spans[r / kTall];
        if (!span.holds(panel)) continue;
        score_tile<kForwardKeys>(a.depth, queries_ + r * kWide, tall * kWide, transposed_ + panel * a.depth * kWide,
                                 scores_ + r * kForwardKeys + panel * kWide - at);
      }
    for (int64_t r = 0; r < count; ++r) activate(a, first, r, spans[r / kTall], at, tall);
    for (int64_t c = 0; c < up(a.value_depth, kWide); c += kWide)
      for (int64_t r = 0; r < tall; r += kTall) {
        const Span span = spans[r / kTall];
        if (span.empty()) continue;
        add_tile<kForwardKeys, 1>(span.last_key - span.first_key, scores_ + r * kForwardKeys + span.first_key - at,
                                  values_ + c * wide + span.first_key * kWide, sums_ + c * tall + r * kWide);
      }
  }

  void activate(const AttentionArguments& a, int64_t first, int64_t r, Span span, int64_t at, int64_t tall) {
    if (span.empty()) return;
    const int64_t begin = span.begin(), width = span.width();
    const Index query = rows_.column[size_t(first + r)];
    Real* p = scores_ + r * kForwardKeys + begin - at;
    if (__builtin_expect(a.score_cap > 0, 0)) cap_row(Real(a.score_cap), width, p);
    if (head_.biased()) head_.add_biases(rows_, first + r, keys_, panels_.data(), begin, width, p);
    if (a.softmax()) {
      const Real correction = softmax_row(head_, query, keys_, panels_.data(), span, p, running_[r]);
      if (correction != Real(1) && at > 0)
        for (int64_t c = 0; c < up(a.value_depth, kWide); c += kWide)
          scale_row<kWide>(sums_ + c * tall + r * kWide, correction, sums_ + c * tall + r * kWide);
    } else if (a.activation == kSilu) {
      pointwise_row(Silu{}, head_, query, keys_, panels_.data(), span, p);
    } else if (a.activation == kSigmoid) {
      pointwise_row(Sigmoid{}, head_, query, keys_, panels_.data(), span, p);
    } else if (a.activation == kLinear) {
      pointwise_row(Linear{}, head_, query, keys_, panels_.data(), span, p);
    } else {
      pointwise_row(SquaredRelu{}, head_, query, keys_, panels_.data(), span, p);
    }
    if (a.dropping) {
      head_.kept(query, keys_, begin, width, keep_);
      for (int64_t j = 0; j < width; ++j) p[j] *= keep_[j];
    }
  }

  // One more term of each denominator. A query that sees no key stays one.
  TURBOGR_APART void add_sink(Real sink, int64_t columns, int64_t count, int64_t tall) {
    for (int64_t r = 0; r < count; ++r) {
      Running& running = running_[r];
      const Real before = running.top;
      if (before == -std::numeric_limits<Real>::infinity()) continue;
      running.top = std::max(before, sink);
      const Real correction = std::exp(before - running.top);
      running.total = running.total * correction + std::exp(sink - running.top);
      for (int64_t c = 0; c < columns; c += kWide)
        scale_row<kWide>(sums_ + c * tall + r * kWide, correction, sums_ + c * tall + r * kWide);
    }
  }

  void finish(const AttentionArguments& a, int64_t h, int64_t first, int64_t count, int64_t tall) {
    if (a.sink) add_sink(a.sink[h], up(a.value_depth, kWide), count, tall);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = rows_.row[size_t(first + r)] * a.heads + h;
      const Running& running = running_[r];
      const bool blind = a.softmax() && running.top == -std::numeric_limits<Real>::infinity();
      const Real factor = !a.softmax() ? gain(a) : blind ? Real(0) : gain(a) / running.total;
      unpack_row(sums_, tall, r, a.value_depth, factor, (S*)a.result + row * a.value_depth);
      if (a.softmax())
        a.log_sum[row] = blind ? std::numeric_limits<Real>::infinity() : running.top + std::log(running.total);
    }
  }

  Rows keys_, rows_;
  std::vector<Panel> panels_;
  Head head_;
  Scratch scratch_;
  Real *transposed_, *values_, *queries_, *scores_, *sums_;
  Running running_[kQueries + kTall];
  Index low_[kQueries / kTall], high_[kQueries / kTall];
  Real keep_[kForwardKeys];
};

template <typename S>
void forward(const AttentionArguments& a) {
  const std::vector<Task> tasks = plan_attention(a, true);
  fill_idle<S>(a, a.query_offsets, a.key_offsets, a.query_rows, a.heads * a.value_depth, a.result);
  if (a.softmax())
    fill_idle<Real>(a, a.query_offsets, a.key_offsets, a.query_rows, a.heads, a.log_sum,
                    std::numeric_limits<Real>::infinity());
  parallel_for(int64_t(tasks.size()), a.threads, [&](int64_t i) {
    Forward<S>& worker = own<Forward<S>>();
    worker.run(a, tasks[size_t(i)]);
  });
}

}  // namespace
}  // namespace turbogr

extern "C" const char* turbogr_jagged_attention(const turbogr::AttentionArguments* a) {
  return turbogr::guarded([&]() -> const char* {
    using namespace turbogr;
    if (!with_storage(a->type, [&](auto* s) { forward<std::remove_pointer_t<decltype(s)>>(*a); }))
      return failure("jagged_attention: this library does not compute in the dtype of query");
    return nullptr;
  });
}
