// Row-wise Adagrad of the rows that have a gradient, and of a copy of them in FP16, in one visit of each row.
#include "half_copy.h"

namespace turbogr {
namespace {

struct RowAdagradArguments {
  Real* table;
  Real* sums;           // of each row of the table: the mean square of its gradients so far, added up
  const int64_t* rows;  // each once
  const Real* gradient;
  HalfCopy copy;  // its pointers are null where there is none
  int64_t total, depth, stride, gradient_stride, block, count, threads;
  double rate, eps;
};

void update(const RowAdagradArguments& a, int64_t first, int64_t last) {
  const Lanes rate = broadcast(Real(-a.rate));
  for (int64_t i = first; i < last; ++i) {
    if (i + kRowsAhead < last) {
      const int64_t next = a.rows[i + kRowsAhead];
      prefetch_row(a.table + next * a.stride, a.depth);
      __builtin_prefetch(a.sums + next, 1);
    }
    const Real* gradient = a.gradient + i * a.gradient_stride;
    const Real square = total(a.depth, [&](int64_t at, auto cut) {
      const Lanes g = load_lanes(gradient + at, cut);
      return g * g;
    });
    Real& sum = a.sums[a.rows[i]];
    sum += square / Real(a.depth);
    const Lanes root = broadcast(Real(std::sqrt(sum) + Real(a.eps)));
    Real* row = a.table + a.rows[i] * a.stride;
    across(a.depth, [&](int64_t at, auto cut) {
      store_lanes(row + at, load_lanes(row + at, cut) + rate * (load_lanes(gradient + at, cut) / root), cut);
    });
#if defined(TURBOGR_HALVES)
    if (a.copy.halves != nullptr) follow_row(a.copy, a.rows[i], a.block, row, a.depth);
#endif
  }
  stream_end();
}

}  // namespace

extern "C" const char* turbogr_row_adagrad(const RowAdagradArguments* a) {
  return guarded([&]() -> const char* {
    for_rows(a->count, rows_per_chunk(a->depth), a->threads,
             [&](int64_t first, int64_t last) { update(*a, first, last); });
#if defined(TURBOGR_HALVES)
    if (a->copy.halves != nullptr)
      scale_changed(a->copy, a->total, a->block, a->table, a->stride, a->depth, a->threads);
#endif
    return nullptr;
  });
}

}  // namespace turbogr
