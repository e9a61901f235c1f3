// Gradient of a table whose rows were multiplied with queries: each row of it is written once.
//
// Entries (row, position) are sorted by row first, stably. Then each row of the result belongs to one thread, which
// sums in the order of positions: the same bits for any number of threads, and rows that nobody names become zero in
// the same pass.
#include <vector>

#include "lookup.h"

namespace turbogr {
namespace {

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
  uint32_t row, position;  // positions of own rows follow those of ids
};

// Numbers from `from` on, and as many again as room: the result lies in either.
Named* sorted(Named* from, Named* to, int64_t count, uint32_t top) {
  constexpr int digit = 11, values = 1 << digit;
  for (int shift = 0; shift < 32 && (top >> shift) > 0; shift += digit) {
    int64_t starts[values] = {};
    for (int64_t i = 0; i < count; ++i) ++starts[(from[i].row >> shift) & (values - 1)];
    int64_t start = 0;
    for (int64_t& place : starts) {
      const int64_t here = place;
      place = start;
      start += here;
    }
    for (int64_t i = 0; i < count; ++i) to[starts[(from[i].row >> shift) & (values - 1)]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

// Columns that are summed up together. Of all queries, these fit into the second cache.
constexpr int kVectors = 8;
constexpr int64_t kPanel = kVectors * kWidth;

// Queries, kPanel columns of all of them behind each other; zeros behind the last column.
void pack_queries(const TableGradientArguments& a, Real* to) {
  for (int64_t c = 0; c < a.depth; c += kPanel)
    for (int64_t t = 0; t < a.positions; ++t, to += kPanel) {
      const int64_t width = std::min(kPanel, a.depth - c);
      std::copy_n(a.query + t * a.depth + c, width, to);
      std::fill(to + width, to + kPanel, Real(0));
    }
}

// Neighbouring queries and the slopes of their products with one row.
struct Term {
  const Real* slopes;
  int32_t first, count, group;  // queries; own rows follow the last group
};

// A row that has terms, those before `end`.
struct Sum {
  int64_t row, end;
};

// Rows of the result that are worked on together, panel by panel, while slopes are close.
struct Window {
  static constexpr int64_t kTerms = 1536;
  std::vector<Term> terms, by_group;
  std::vector<Sum> sums;
  std::vector<Real> slopes;             // of by_group: they lie anywhere, and every panel reads them
  std::vector<Real> wide;               // sums that go through a norm
  std::vector<int32_t> starts, places;  // of groups; of terms in by_group
  Scratch products;                     // of by_group, in one panel
};

template <typename S, bool kStream>
class TableGradient {
 public:
  TableGradient(const TableGradientArguments& a, const Real* queries, const Named* named, int64_t count)
      : a_(a),
        queries_(queries),
        entries_(a.positions * a.each),
        groups_((a.positions + a.group - 1) / a.group),
        pitch_((a.depth + kPanel - 1) / kPanel * kPanel),
        named_(named),
        end_(named + count) {}

  // Rows [row, last) of the result.
  void rows(int64_t row, int64_t last) const {
    Window& window = own<Window>();
    const Named* next = std::lower_bound(named_, end_, row, [](const Named& n, int64_t row) { return n.row < row; });
    const Named* end = std::lower_bound(next, end_, last, [](const Named& n, int64_t row) { return n.row < row; });
    do {
      next = open(next, end, window);
      const int64_t until = next < end ? window.sums.back().row + 1 : last;
      clear(row, until, window);
      a_.eps < 0 ? add_up<false>(window) : add_up<true>(window);
      row = until;
    } while (next < end);
    if (kStream) stream_end();
  }

 private:
  // Whole rows, and as many as there is room for, but one.
  __attribute__((noinline)) const Named* open(const Named* next, const Named* last, Window& window) const {
    const int64_t most = a_.eps < 0 ? Window::kTerms : Window::kTerms / 8;
    const Named* end = next + std::min<int64_t>(most, last - next);
    while (next < end && end < last && end->row == end[-1].row) ++end;
    window.terms.resize(size_t(end - next));
    window.sums.resize(size_t(end - next));
    Term* terms = window.terms.data();
    Sum* sums = window.sums.data();
    int64_t count = 0, row = -1;
    for (int64_t i = 0; next < end; ++next, ++i) {
      count += next->row != row;  // a branch would be foreseen wrongly
      row = next->row;
      sums[count - 1] = {row, i + 1};
      terms[i] = term_of(next->position);
    }
    window.sums.resize(size_t(count));
    return end;
  }

  TURBOGR_INLINE Term term_of(uint32_t position) const {
    if (position >= entries_)
      return {a_.own_slopes + (position - entries_), int32_t(position - entries_), 1, int32_t(groups_)};
    const Real* slopes = a_.slopes + int64_t(position) * a_.group;
    __builtin_prefetch(slopes);
    const uint32_t group = position / uint32_t(a_.each * a_.group);
    const int64_t first = group * a_.group;
    return {slopes, int32_t(first), int32_t(std::min(a_.group, a_.positions - first)), int32_t(group)};
  }

  // Rows that nobody names.
  __attribute__((noinline)) void clear(int64_t row, int64_t until, const Window& window) const {
    const Sum* named = window.sums.data();
    const Sum* end = named + window.sums.size();
    S* to = (S*)a_.result + row * a_.depth;
    for (; row < until; ++row, to += a_.depth) {
      if (named < end && named->row == row) {
        ++named;
      } else {
        clear_row(to);
      }
    }
  }

  TURBOGR_INLINE void clear_row(S* to) const {
    int64_t c = 0;
    for (; c + kPanel <= a_.depth; c += kPanel)
      for (int v = 0; v < kVectors; ++v) put(to + c + v * kWidth, Lanes{}, Whole{});
    across(a_.depth - c, [&](int64_t at, auto cut) { put(to + c + at, Lanes{}, cut); });
  }

  template <bool kNorm>
  void add_up(Window& window) const {
    if (kNorm) window.wide.resize(window.sums.size() * size_t(pitch_));
    // Terms of a group that follow each other find their queries in the first cache. Those of one row do anyway.
    const int64_t terms = int64_t(window.terms.size());
    const bool grouped = a_.group > 1 && terms > 2 * groups_ && terms <= 2 * Window::kTerms;
    if (grouped) sort_by_group(window);
    const Real* queries = queries_;
    for (int64_t c = 0; c < a_.depth; c += kPanel, queries += a_.positions * kPanel) {
      if (a_.group == 1) {
        add_terms<kNorm>(window, queries, c);
      } else if (grouped) {
        const Real* products = multiply(window, queries);
        add_products<kNorm>(window, c, [&](size_t term) { return products + window.places[term] * kPanel; });
      } else {
        Real product[kPanel];
        add_products<kNorm>(window, c, [&](size_t term) {
          const Term& t = window.terms[term];
          multiply_tile<1>(t.count, t.slopes, queries + t.first * kPanel, product);
          return product;
        });
      }
    }
    if (!kNorm) return;
    for (size_t i = 0; i < window.sums.size(); ++i) through_norm(window.sums[i].row, window.wide.data() + i * pitch_);
  }

  // Writes the sums of one row in columns [c, c + kPanel). Sums stay in registers where compilers see at once that
  // their numbers are constants: hence the unrolling, here and below.
  template <bool kNorm>
  TURBOGR_INLINE void finish(Window& window, size_t number, int64_t c, const Lanes (&sums)[kVectors]) const {
    if constexpr (kNorm) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(window.wide.data() + number * pitch_ + c + v * kWidth, sums[v]);
      return;
    }
    S* to = (S*)a_.result + window.sums[number].row * a_.depth + c;
    const int64_t width = a_.depth - c;
    if (width >= kPanel) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) put(to + v * kWidth, sums[v], Whole{});
      return;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kWidth;
      if (at + kWidth <= width) {
        put(to + at, sums[v], Whole{});
      } else if (at < width) {
        put(to + at, sums[v], Part{width - at});
      }
    }
  }

  // Terms of one query each.
  template <bool kNorm>
  __attribute__((noinline)) void add_terms(Window& window, const Real* queries, int64_t c) const {
    const Term* term = window.terms.data();
    for (size_t i = 0; i < window.sums.size(); ++i) {
      Lanes sums[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] = Lanes{};
      const Term* end = window.terms.data() + window.sums[i].end;
      do {
        const Real* query = queries + term->first * kPanel;
        const Lanes slope = broadcast(*term->slopes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += slope * load(query + v * kWidth);
      } while (++term < end);
      finish<kNorm>(window, i, c, sums);
    }
  }

  // In the order of terms, which is that of groups.
  template <bool kNorm, typename Product>
  TURBOGR_INLINE void add_products(Window& window, int64_t c, Product product_of) const {
    size_t term = 0;
    for (size_t i = 0; i < window.sums.size(); ++i) {
      Lanes sums[kVectors];
      const Real* product = product_of(term);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] = load(product + v * kWidth);
      while (int64_t(++term) < window.sums[i].end) {
        product = product_of(term);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += load(product + v * kWidth);
      }
      finish<kNorm>(window, i, c, sums);
    }
  }

  __attribute__((noinline)) void sort_by_group(Window& window) const {
    window.starts.assign(size_t(groups_) + 2, 0);
    for (const Term& t : window.terms) ++window.starts[size_t(t.group) + 1];
    for (size_t g = 0; g < size_t(groups_); ++g) window.starts[g + 1] += window.starts[g];
    window.by_group.resize(window.terms.size());
    window.places.resize(window.terms.size());
    window.slopes.resize(window.terms.size() * size_t(a_.group));
    for (size_t i = 0; i < window.terms.size(); ++i) {
      const Term& t = window.terms[i];
      const int32_t place = window.places[i] = window.starts[size_t(t.group)]++;
      Real* slopes = window.slopes.data() + place * a_.group;
      across(t.count, [&](int64_t at, auto cut) { store_lanes(slopes + at, load_lanes(t.slopes + at, cut), cut); });
      window.by_group[size_t(place)] = t;
    }
  }

  // What terms of by_group add to their rows, several of a group at a time.
  __attribute__((noinline)) const Real* multiply(Window& window, const Real* queries) const {
    Real* products = (Real*)window.products.room(window.terms.size() * kPanel * sizeof(Real));
    Real* to = products;
    const Real* slopes = window.slopes.data();
    const Term* end = window.by_group.data() + window.by_group.size();
    for (const Term* t = window.by_group.data(); t < end;) {
      const Real* query = queries + t->first * kPanel;
      int64_t some = 1;
      while (some < 4 && t + some < end && t[some].first == t->first && t[some].count == t->count) ++some;
      if (some == 4) {
        multiply_tile<4>(t->count, slopes, query, to);
      } else if (some >= 2) {
        multiply_tile<2>(t->count, slopes, query, to);
        some = 2;
      } else {
        multiply_tile<1>(t->count, slopes, query, to);
      }
      t += some, slopes += some * a_.group, to += some * kPanel;
    }
    return products;
  }

  template <int kSome>
  TURBOGR_INLINE void multiply_tile(int32_t count, const Real* slopes, const Real* query, Real* to) const {
    constexpr int kAtOnce = kVectors / kSome;  // vectors
    for (int c = 0; c < kVectors; c += kAtOnce, query += kAtOnce * kWidth, to += kAtOnce * kWidth) {
      Lanes sums[kSome][kAtOnce];
#pragma GCC unroll 8
      for (int i = 0; i < kSome; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < kAtOnce; ++v) sums[i][v] = Lanes{};
      const Real* at = query;
#pragma GCC unroll 2
      for (int32_t m = 0; m < count; ++m, at += kPanel) {
        Lanes x[kAtOnce];
        for (int v = 0; v < kAtOnce; ++v) x[v] = load(at + v * kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kSome; ++i) {
          const Lanes slope = broadcast(slopes[i * a_.group + m]);
          for (int v = 0; v < kAtOnce; ++v) sums[i][v] += slope * x[v];
        }
      }
      for (int i = 0; i < kSome; ++i)
        for (int v = 0; v < kAtOnce; ++v) store(to + i * kPanel + v * kWidth, sums[i][v]);
    }
  }

  // From the gradient of row / max(|row|, eps) to that of the row.
  void through_norm(int64_t number, const Real* grad) const {
    const S* row = (const S*)a_.table + number * a_.stride;
    S* result = (S*)a_.result + number * a_.depth;
    const Real size = TableRows<S>::norm(row, a_.depth), eps = Real(a_.eps);
    const bool divided = !(size < eps);
    const Real inverse = 1 / (divided ? size : eps);
    const Real along = divided ? product(row, grad, a_.depth) * inverse * inverse : Real(0);
    across(a_.depth, [&](int64_t at, auto cut) {
      const Lanes g = load_lanes(grad + at, cut);
      const Lanes x = divided ? g - broadcast(along) * load_lanes(row + at, cut) : g;
      put(result + at, x * broadcast(inverse), cut);
    });
  }

  template <typename Cut>
  static TURBOGR_INLINE void put(S* to, Lanes x, Cut cut) {
    if constexpr (kStream && std::is_same_v<S, Real> && std::is_same_v<Cut, Whole>) {
      stream(to, x);
    } else {
      store_lanes(to, x, cut);
    }
  }

  const TableGradientArguments& a_;
  const Real* queries_;
  const int64_t entries_, groups_, pitch_;
  const Named *named_, *end_;
};

constexpr int64_t kMuch = int64_t(16) << 20;  // bytes that no cache keeps for whoever reads next

template <typename S, bool kStream>
void fill(const TableGradientArguments& a, const Real* queries, const Named* named, int64_t count) {
  const TableGradient<S, kStream> gradient(a, queries, named, count);
  const int64_t work = (a.limit + count * a.group) * a.depth;
  const int64_t tasks = std::min(std::max<int64_t>(1, work / kChunk), 64 * a.threads);
  for_rows(a.limit, (a.limit + tasks - 1) / tasks, a.threads,
           [&](int64_t first, int64_t last) { gradient.rows(first, last); });
}

template <typename S>
void run(const TableGradientArguments& a, const Real* queries, const Named* named, int64_t count) {
  const int64_t bytes = a.limit * a.depth * int64_t(sizeof(S));
  const bool aligned = a.depth % kWidth == 0 && uintptr_t(a.result) % kVectorBytes == 0;
  bytes > kMuch && aligned ? fill<S, std::is_same_v<S, Real>>(a, queries, named, count)
                           : fill<S, false>(a, queries, named, count);
}

}  // namespace

extern "C" const char* turbogr_table_gradient(const TableGradientArguments* a) {
  const int64_t entries = a->positions * a->each, own = a->own_ids == nullptr ? 0 : a->positions;
  if (const char* error = require_rows(a->ids, entries, a->limit, "ids")) return error;
  if (const char* error = require_rows(a->own_ids, own, a->limit, "own_ids")) return error;
  if (entries + own > UINT32_MAX || a->limit > UINT32_MAX)
    return failure("lookup_table_gradient: more than 2^32 entries or rows");
  if (a->limit == 0 || a->depth == 0) return nullptr;
  static thread_local Scratch scratch;
  Named* named = (Named*)scratch.room(size_t(2 * (entries + own)) * sizeof(Named));
  for (int64_t i = 0; i < entries; ++i) named[i] = {uint32_t(a->ids[i]), uint32_t(i)};
  for (int64_t t = 0; t < own; ++t) named[entries + t] = {uint32_t(a->own_ids[t]), uint32_t(entries + t)};
  named = sorted(named, named + entries + own, entries + own, uint32_t(a->limit - 1));
  static thread_local Scratch panels;
  const int64_t columns = (a->depth + kPanel - 1) / kPanel * kPanel;
  Real* queries = (Real*)panels.room(size_t(a->positions * columns) * sizeof(Real));
  pack_queries(*a, queries);
  return for_storage(a->type, [&](auto* storage) {
    run<std::remove_pointer_t<decltype(storage)>>(*a, queries, named, entries + own);
  });
}

}  // namespace turbogr
