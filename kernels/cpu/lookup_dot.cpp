// Scores of queries against rows of a table, and the queries' gradient: rows are multiplied where they lie.
#include "lookup.h"

namespace turbogr {
namespace {

struct LookupDotArguments {
  Lookup lookup;
  const Real* query;  // positions x depth
  const int64_t* ids;
  Real* scores;      // positions x each; slopes, where there is query_grad
  Real* query_grad;  // null, or what is asked for instead of scores
  int64_t positions, each, threads;
};

template <typename S>
void score(const LookupDotArguments& a, const TableRows<S>& rows, int64_t position) {
  const Real* query = a.query + position * a.lookup.depth;
  const int64_t first = position * a.each, end = first + a.each;
  for (int64_t entry = first; entry < end; ++entry) {
    if ((entry - first) % kRows == 0) rows.announce(entry + kRows, kRows);
    rows.prefetch(entry + kRows);
    a.scores[entry] = rows.factor(entry) * product(rows.at(entry), query, a.lookup.depth);
  }
}

template <typename S>
void add_up(const LookupDotArguments& a, const TableRows<S>& rows, int64_t position) {
  Real* to = a.query_grad + position * a.lookup.depth;
  std::fill(to, to + a.lookup.depth, Real(0));
  const int64_t end = (position + 1) * a.each;
  for (int64_t entry = position * a.each; entry < end; entry += kRows) {
    const S* near[kRows];
    Real weights[kRows];
    const int64_t count = std::min(kRows, end - entry);
    rows.announce(entry + kRows, kRows);
    for (int64_t i = 0; i < count; ++i) {
      rows.prefetch(entry + kRows + i);
      near[i] = rows.at(entry + i);
      weights[i] = rows.factor(entry + i) * a.scores[entry + i];
    }
    add_rows(near, weights, count, a.lookup.depth, to);
  }
}

}  // namespace

extern "C" const char* turbogr_lookup_dot(const LookupDotArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->lookup.type, [&](auto* storage) {
      const TableRows<std::remove_pointer_t<decltype(storage)>> rows(a->lookup);
      for_rows(a->positions, rows_per_chunk(a->each * a->lookup.depth), a->threads, [&](int64_t first, int64_t last) {
        for (int64_t position = first; position < last; ++position)
          a->query_grad == nullptr ? score(*a, rows, position) : add_up(*a, rows, position);
      });
    });
  });
}

}  // namespace turbogr
