// Where products of rows stand among each other: counted tile by tile, and never stored.
//
// A product is one chain of multiply-adds along the depth, in the same order wherever its tile lies: rows that are equal
// to the last bit have products that are.
#include <limits>

#include "panels.h"

namespace turbogr {
namespace {

struct StandingArguments {
  const Real* queries;
  const Real* rows;
  Real* own;            // of each query: what others are compared with
  const int64_t* skip;  // of each query: a row that does not count; any other number for none
  int64_t* above;       // rows with a larger product
  int64_t* equal;
  int64_t count, depth, query_stride, total, row_stride, threads;
};

using Counts = Vector<Bits<Real>>;
constexpr int64_t kNumbers = 1 << 15;  // of rows that are kept transposed at a time

// Room behind the last row, so that a tile may begin at any.
int64_t panel_rows(int64_t count) { return count + kTall; }

Real* packed_queries(const StandingArguments& a) {
  const int64_t rows = panel_rows(a.count);
  Real* panels = (Real*)own<Scratch>().room(size_t(rows * up(a.depth, kWide)) * sizeof(Real));
  pack_panels<Real>([&](int64_t i) { return a.queries + i * a.query_stride; }, a.count, rows, a.depth, Real(1), panels);
  return panels;
}

struct Transposed : Scratch {};

void products(const StandingArguments& a, const Real* queries, int64_t first, const Real* rows, Real* tile) {
  score_tile<kWide>(a.depth, queries + first * kWide, panel_rows(a.count) * kWide, rows, tile);
}

// Comparisons that hold are -1 in each lane.
int64_t summed(Counts lanes) {
  int64_t sum = 0;
  for (int lane = 0; lane < kLane; ++lane) sum -= lanes[lane];
  return sum;
}

void count_block(const StandingArguments& a, const Real* queries, int64_t first, int64_t last) {
  Real* block = (Real*)own<Transposed>().room(size_t(up(last - first, kWide) * a.depth) * sizeof(Real));
  pack_transposed<Real>([&](int64_t i) { return a.rows + (first + i) * a.row_stride; }, last - first, a.depth, block);
  const Real nothing = std::numeric_limits<Real>::quiet_NaN();  // neither above nor equal
  alignas(64) Real tile[kTall * kWide];
  for (int64_t q = 0; q < a.count; q += kTall) {
    const int64_t tall = std::min<int64_t>(kTall, a.count - q);
    Counts above[kTall] = {}, equal[kTall] = {};
    for (int64_t r = first; r < last; r += kWide) {
      products(a, queries, q, block + (r - first) * a.depth, tile);
      const int64_t wide = std::min<int64_t>(kWide, last - r);
      for (int64_t m = 0; m < tall; ++m) {
        Real* row = tile + m * kWide;
        for (int64_t c = wide; c < kWide; ++c) row[c] = nothing;
        const int64_t skipped = a.skip[q + m] - r;
        if (skipped >= 0 && skipped < wide) row[skipped] = nothing;
        const Lanes mark = broadcast(a.own[q + m]), left = load(row), right = load(row + kLane);
        above[m] += (Counts)(left > mark) + (Counts)(right > mark);
        equal[m] += (Counts)(left == mark) + (Counts)(right == mark);
      }
    }
    for (int64_t m = 0; m < tall; ++m) {
      // Whole numbers: the order in which threads add them does not show.
      __atomic_fetch_add(a.above + q + m, summed(above[m]), __ATOMIC_RELAXED);
      __atomic_fetch_add(a.equal + q + m, summed(equal[m]), __ATOMIC_RELAXED);
    }
  }
}

}  // namespace

extern "C" const char* turbogr_own_products(const StandingArguments* a) {
  return guarded([&]() -> const char* {
    const Real* queries = packed_queries(*a);
    parallel_for((a->count + kWide - 1) / kWide, a->threads, [&](int64_t group) {
      const int64_t first = group * kWide, last = std::min(a->count, first + kWide);
      Real* block = (Real*)own<Transposed>().room(size_t(kWide * a->depth) * sizeof(Real));
      pack_transposed<Real>([&](int64_t i) { return a->rows + (first + i) * a->row_stride; }, last - first, a->depth,
                            block);
      alignas(64) Real tile[kTall * kWide];
      for (int64_t q = first; q < last; q += kTall) {
        products(*a, queries, q, block, tile);
        for (int64_t m = 0; m < std::min<int64_t>(kTall, last - q); ++m)
          a->own[q + m] = tile[m * kWide + (q + m - first)];
      }
    });
    return nullptr;
  });
}

extern "C" const char* turbogr_standing(const StandingArguments* a) {
  return guarded([&]() -> const char* {
    const Real* queries = packed_queries(*a);
    const int64_t some = std::max<int64_t>(kWide, kNumbers / std::max<int64_t>(1, a->depth) / kWide * kWide);
    parallel_for((a->total + some - 1) / some, a->threads, [&](int64_t part) {
      count_block(*a, queries, part * some, std::min(a->total, (part + 1) * some));
    });
    return nullptr;
  });
}

}  // namespace turbogr
