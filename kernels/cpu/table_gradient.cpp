// Gradient of a table whose rows were multiplied with queries: each row of it is written once.
//
// Entries are dealt to windows of rows first. Then each window of the result belongs to one thread, which sums in the
// order of positions: the same bits for any number of threads, and rows that nobody names become zero in the same pass.
#include "table_entries.h"

namespace turbogr {
namespace {

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

// Entries of one window.
struct Entries {
  const Named* named;
  const Real* slopes;
  uint32_t count;
};

// Rows are counted from the first of the window. A sum has entries up to `end` in the order of rows.
struct Sum {
  uint32_t row, end;
};

// An entry of a group, whose product is wanted.
struct Term {
  const Real* slopes;
  uint32_t query, row;
};
constexpr uint32_t kNoQuery = ~uint32_t(0);
constexpr int kAtOnce = 4;  // terms of one group

// Memory of a thread for one window.
struct WindowRoom {
  std::vector<uint32_t> starts;       // of rows, in `order`
  std::vector<uint32_t> order;        // entries, or those that are not alone, by row
  std::vector<uint32_t> unnamed;      // rows
  std::vector<Sum> sums;              // rows
  std::vector<Term> alone, together;  // by group: those of rows with one entry, and others
  std::vector<Real> merged;           // slopes of entries
  std::vector<Real> wide;             // sums that go through a norm
  Scratch products;                   // of terms that are not alone, in one panel
  size_t sum_count, unnamed_count;
};

template <typename T>
T* room_for(std::vector<T>& of, size_t count) {
  if (of.size() < count) of.resize(count);
  return of.data();
}

template <typename S, bool kStream>
class TableGradient {
 public:
  static constexpr int64_t kEntries = 3072;  // of a window: products that wait for others stay in the second cache

  TableGradient(const TableGradientArguments& a, const Real* queries)
      : a_(a), queries_(queries), pitch_((a.depth + kPanel - 1) / kPanel * kPanel) {}

  void fill(const Window& window, const Named* named, const Real* slopes) const {
    WindowRoom& room = own<WindowRoom>();
    const int64_t count = window.end - window.begin;
    const Entries entries{named + window.begin, slopes + window.begin * a_.group, uint32_t(count)};
    const bool grouped = a_.group > 1 && count <= 2 * kEntries;
    count_up(window, entries, grouped && a_.eps < 0 ? 2 : 1, room);
    grouped ? split(window, entries, room) : sort(window, entries, room);
    clear(window, room);
    const Real* queries = queries_;
    for (int64_t c = 0; c < a_.depth; c += kPanel, queries += a_.positions * kPanel) {
      const Place place{(S*)a_.result + window.row * a_.depth + c, c};
      if (grouped) {
        write_alone(room.alone.data(), queries, place);
        Real* const products = (Real*)room.products.room(size_t(count * kPanel) * sizeof(Real));
        multiply(room.together.data(), queries, products);
        add_products(products, room, place);
      } else if (a_.group > 1) {
        add_merged(entries, queries, room, place);
      } else {
        add_terms(entries, queries, room, place);
      }
    }
    if (a_.eps >= 0) through_norms(window.row, room);
    if (kStream) stream_end();
  }

 private:
  // The window's first row, from a column on.
  struct Place {
    S* row;
    int64_t column;
  };

  // Rows with `least` entries or more become sums; where the entries of others would start, is behind all entries.
  // There are no branches: they would be foreseen wrongly.
  __attribute__((noinline)) void count_up(const Window& window, const Entries& entries, uint32_t least,
                                          WindowRoom& room) const {
    const uint32_t first = uint32_t(window.row), rows = uint32_t(window.last - window.row);
    uint32_t *starts = room_for(room.starts, rows), *unnamed = room_for(room.unnamed, rows);
    Sum* sums = room_for(room.sums, rows);
    std::fill_n(starts, rows, 0);
    for (uint32_t i = 0; i < entries.count; ++i) ++starts[entries.named[i].row - first];
    uint32_t start = 0, sum_count = 0, unnamed_count = 0;
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t count = starts[row], summed = count >= least, mask = 0 - summed;
      starts[row] = (start & mask) | (entries.count & ~mask);
      start += count & mask;
      sums[sum_count] = {row, start};
      sum_count += summed;
      unnamed[unnamed_count] = row;
      unnamed_count += count == 0;
    }
    room.sum_count = sum_count;
    room.unnamed_count = unnamed_count;
  }

  // Entries by row, stably.
  __attribute__((noinline)) void sort(const Window& window, const Entries& entries, WindowRoom& room) const {
    const uint32_t first = uint32_t(window.row);
    uint32_t *starts = room.starts.data(), *order = room_for(room.order, entries.count);
    for (uint32_t i = 0; i < entries.count; ++i) order[starts[entries.named[i].row - first]++] = i;
  }

  // Entries of no sum, which are alone in their rows, and the others: both in the order of groups, as they come. These
  // by row, too.
  __attribute__((noinline)) void split(const Window& window, const Entries& entries, WindowRoom& room) const {
    const uint32_t first = uint32_t(window.row);
    uint32_t *starts = room.starts.data(), *order = room_for(room.order, entries.count + 1);
    Term* alone = room_for(room.alone, entries.count + kAtOnce);
    Term* together = room_for(room.together, entries.count + kAtOnce);
    uint32_t alone_count = 0, together_count = 0;
    const Real* slopes = entries.slopes;
    for (uint32_t i = 0; i < entries.count; ++i, slopes += a_.group) {
      const Named entry = entries.named[i];
      const uint32_t row = entry.row - first, at = starts[row]++;
      order[at] = together_count;
      alone[alone_count] = {slopes, entry.query, row};
      together[together_count] = {slopes, entry.query, row};
      alone_count += at == entries.count;
      together_count += at != entries.count;
    }
    for (int i = 0; i < kAtOnce; ++i) alone[alone_count + i].query = together[together_count + i].query = kNoQuery;
  }

  // Rows that nobody names.
  __attribute__((noinline)) void clear(const Window& window, const WindowRoom& room) const {
    for (size_t i = 0; i < room.unnamed_count; ++i) {
      S* to = (S*)a_.result + (window.row + room.unnamed[i]) * a_.depth;
      int64_t c = 0;
      for (; c + kPanel <= a_.depth; c += kPanel)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) put(to + c + v * kWidth, Lanes{}, Whole{});
      across(a_.depth - c, [&](int64_t at, auto cut) { put(to + c + at, Lanes{}, cut); });
    }
  }

  // Rows are written a panel at a time: memory takes single lines of several rows in turns much more slowly.
  __attribute__((noinline)) void write_alone(const Term* term, const Real* queries, Place place) const {
    Real products[kAtOnce * kPanel];
    while (term->query != kNoQuery) {
      const int some = multiply_some(term, queries, products);
      for (const Real* product = products; product < products + some * kPanel; product += kPanel, ++term) {
        Lanes sums[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = load(product + v * kWidth);
        write(place.row + term->row * a_.depth, a_.depth - place.column, sums);
      }
    }
  }

  __attribute__((noinline)) void multiply(const Term* term, const Real* queries, Real* products) const {
    while (term->query != kNoQuery) {
      const int some = multiply_some(term, queries, products);
      term += some, products += some * kPanel;
    }
  }

  // Products of the next terms of a group, and how many: they find their queries in the first cache.
  TURBOGR_INLINE int multiply_some(const Term* term, const Real* queries, Real* products) const {
    int some = 1;
    while (some < kAtOnce && term[some].query == term->query) ++some;
    if (some == kAtOnce) {
      tile<kAtOnce>(term, queries, products);
    } else if (some >= 2) {
      some = 2;
      tile<2>(term, queries, products);
    } else {
      tile<1>(term, queries, products);
    }
    return some;
  }

  // Products of kSome terms of one group. Sums stay in registers where compilers see at once that their numbers are
  // constants: hence the unrolling, here and below.
  template <int kSome>
  TURBOGR_INLINE void tile(const Term* term, const Real* queries, Real* products) const {
    constexpr int kWide = kVectors / kSome;
    const int32_t count = members(term->query);
    const Real *query = queries + (term->query & ~kOwn) * kPanel, *slopes[kSome];
    for (int i = 0; i < kSome; ++i) slopes[i] = term[i].slopes;
#pragma GCC unroll 8
    for (int c = 0; c < kPanel; c += kWide * kWidth) {
      Lanes sums[kSome][kWide];
#pragma GCC unroll 8
      for (int i = 0; i < kSome; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < kWide; ++v) sums[i][v] = Lanes{};
      const Real* at = query + c;
#pragma GCC unroll 2
      for (int32_t m = 0; m < count; ++m, at += kPanel) {
        Lanes x[kWide];
        for (int v = 0; v < kWide; ++v) x[v] = load(at + v * kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kSome; ++i) {
          const Lanes slope = broadcast(slopes[i][m]);
          for (int v = 0; v < kWide; ++v) sums[i][v] += slope * x[v];
        }
      }
      for (int i = 0; i < kSome; ++i)
        for (int v = 0; v < kWide; ++v) store(products + i * kPanel + c + v * kWidth, sums[i][v]);
    }
  }

  TURBOGR_INLINE int32_t members(uint32_t query) const {
    return query >= kOwn ? 1 : int32_t(std::min(a_.group, a_.positions - query));
  }

  // Sums of one panel of a row, which goes on for `width` columns.
  static TURBOGR_INLINE void write(S* to, int64_t width, const Lanes (&sums)[kVectors]) {
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

  // add(entries, end, sums) for each sum, with its entries.
  template <typename Add>
  TURBOGR_INLINE void each_sum(WindowRoom& room, Place place, Add add) const {
    if (a_.eps >= 0) room_for(room.wide, room.sum_count * size_t(pitch_));
    const uint32_t *order = room.order.data(), *next = order;
    for (size_t i = 0; i < room.sum_count; ++i) {
      Lanes sums[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] = Lanes{};
      const uint32_t* end = order + room.sums[i].end;
      add(next, end, sums);
      next = end;
      if (a_.eps < 0) {
        write(place.row + room.sums[i].row * a_.depth, a_.depth - place.column, sums);
        continue;
      }
      Real* to = room.wide.data() + int64_t(i) * pitch_ + place.column;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(to + v * kWidth, sums[v]);
    }
  }

  __attribute__((noinline)) void add_products(const Real* products, WindowRoom& room, Place place) const {
    each_sum(room, place, [&](const uint32_t* entry, const uint32_t* end, auto& sums) __attribute__((always_inline)) {
      do {
        const Real* product = products + *entry * kPanel;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += load(product + v * kWidth);
      } while (++entry < end);
    });
  }

  // Entries of one query each.
  __attribute__((noinline)) void add_terms(const Entries& entries, const Real* queries, WindowRoom& room,
                                           Place place) const {
    each_sum(room, place, [&](const uint32_t* entry, const uint32_t* end, auto& sums) __attribute__((always_inline)) {
      do {
        const Real* query = queries + entries.named[*entry].query * kPanel;
        const Lanes slope = broadcast(entries.slopes[*entry]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += slope * load(query + v * kWidth);
      } while (++entry < end);
    });
  }

  // Where rows have many entries, those of the same group are multiplied as one.
  __attribute__((noinline)) void add_merged(const Entries& entries, const Real* queries, WindowRoom& room,
                                            Place place) const {
    Real* slopes = room_for(room.merged, size_t(a_.group));
    each_sum(room, place, [&](const uint32_t* entry, const uint32_t* end, auto& sums) __attribute__((always_inline)) {
      while (entry < end) {
        const Term term{slopes, entries.named[*entry].query, 0};
        const int32_t count = members(term.query);
        std::fill_n(slopes, count, Real(0));
        do {
          const Real* more = entries.slopes + *entry * a_.group;
          across(count, [&](int64_t at, auto cut) {
            store_lanes(slopes + at, load_lanes(slopes + at, cut) + load_lanes(more + at, cut), cut);
          });
        } while (++entry < end && entries.named[*entry].query == term.query);
        Real product[kPanel];
        tile<1>(&term, queries, product);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] += load(product + v * kWidth);
      }
    });
  }

  void through_norms(int64_t row, const WindowRoom& room) const {
    for (size_t i = 0; i < room.sum_count; ++i)
      through_norm(row + room.sums[i].row, room.wide.data() + int64_t(i) * pitch_);
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
  const int64_t pitch_;
};

constexpr int64_t kMuch = int64_t(16) << 20;  // bytes that no cache keeps for whoever reads next

template <typename S, bool kStream>
void fill(const TableGradientArguments& a, const Real* queries) {
  using Gradient = TableGradient<S, kStream>;
  const Gradient gradient(a, queries);
  const int64_t work = (a.limit + a.positions * a.each * a.group) * a.depth;
  const int64_t threads = std::min(a.threads, std::max<int64_t>(1, work / kChunk));
  TableEntries& windows = own<TableEntries>();
  windows.open(a, threads, a.eps < 0 ? Gradient::kEntries : Gradient::kEntries / 16);
  while (windows.deal())
    parallel_for(windows.count(), threads,
                 [&](int64_t i) { gradient.fill(windows[i], windows.entries(), windows.slopes()); });
}

template <typename S>
void run(const TableGradientArguments& a, const Real* queries) {
  const int64_t bytes = a.limit * a.depth * int64_t(sizeof(S));
  const bool aligned = a.depth % kWidth == 0 && uintptr_t(a.result) % kVectorBytes == 0;
  bytes > kMuch && aligned ? fill<S, std::is_same_v<S, Real>>(a, queries) : fill<S, false>(a, queries);
}

}  // namespace

extern "C" const char* turbogr_table_gradient(const TableGradientArguments* a) {
  return guarded([&]() -> const char* {
    const int64_t entries = a->positions * a->each, own = a->own_ids == nullptr ? 0 : a->positions;
    if (entries + own > UINT32_MAX || a->limit > UINT32_MAX || a->positions >= kOwn)
      return failure("lookup_table_gradient: more than 2^32 entries or rows, or 2^31 positions");
    if (a->limit == 0 || a->depth == 0) return nullptr;
    static thread_local Scratch panels;
    const int64_t columns = (a->depth + kPanel - 1) / kPanel * kPanel;
    Real* queries = (Real*)panels.room(size_t(a->positions * columns) * sizeof(Real));
    pack_queries(*a, queries);
    return for_storage(a->type, [&](auto* storage) { run<std::remove_pointer_t<decltype(storage)>>(*a, queries); });
  });
}

}  // namespace turbogr
