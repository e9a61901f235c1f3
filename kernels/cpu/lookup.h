// Rows of a large table that are asked for by number: where they lie, what they are multiplied with, and their sums.
#pragma once

#include <cmath>

#include "rowwise.h"

namespace turbogr {

// What rows are read from; the first fields of several structs of arguments.
struct Lookup {
  const void* rows;       // of `depth` numbers each
  const int64_t* places;  // the row of each entry
  const float* scales;    // what rows are multiplied with, one number for each `block` of them; may be null
  int64_t entries, depth, stride, block, type;
  double eps;  // rows are divided by the larger of this and their norm; below zero, they stay as they are
};

// Rows that are worked on together: close enough to the processor to be read twice.
constexpr int64_t kRows = 24;

template <typename S>
class TableRows {
 public:
  explicit TableRows(const Lookup& a) : a_(a), rows_((const S*)a.rows) {}

  const S* at(int64_t entry) const { return rows_ + a_.places[entry] * a_.stride; }

  // Rows lie anywhere: no machine foresees the next one. Most of the way to a row is to find its page. Pages of several
  // rows are looked for at once when their first lines are asked for one right after the other; the rest comes later.
  TURBOGR_INLINE void announce(int64_t entry, int64_t count) const {
    for (const int64_t end = std::min(entry + count, a_.entries); entry < end; ++entry) __builtin_prefetch(at(entry));
  }

  TURBOGR_INLINE void prefetch(int64_t entry) const {
    if (entry >= a_.entries) return;
    const char* row = (const char*)at(entry);
    for (int64_t line = 64; line < a_.depth * int64_t(sizeof(S)); line += 64) __builtin_prefetch(row + line);
  }

  TURBOGR_INLINE bool have_factors() const { return a_.scales != nullptr || !(a_.eps < 0); }

  // The number that makes a row what it stands for.
  TURBOGR_INLINE Real factor(int64_t entry) const {
    const Real scale = a_.scales == nullptr ? Real(1) : Real(a_.scales[a_.places[entry] / a_.block]);
    return a_.eps < 0 ? scale : scale / std::max(norm(at(entry), a_.depth) * std::abs(scale), Real(a_.eps));
  }

  template <typename T>
  static Real norm(const T* row, int64_t depth) {
    return std::sqrt(total(depth, [&](int64_t at, auto cut) {
      const Lanes x = load_lanes(row + at, cut);
      return x * x;
    }));
  }

 private:
  const Lookup& a_;
  const S* rows_;
};

template <typename S>
TURBOGR_INLINE Real product(const S* row, const Real* query, int64_t depth) {
  return total(depth, [&](int64_t at, auto cut) { return load_lanes(row + at, cut) * load_lanes(query + at, cut); });
}

// put(at, from(at, cut) + sum over i of weights[i] * rows[i], cut) for all columns, in the order of rows.
template <typename S, typename From, typename Put>
TURBOGR_INLINE void weighted_sum(const S* const* rows, const Real* weights, int64_t count, int64_t depth, From from,
                                 Put put) {
  constexpr int kVectors = 8;
  int64_t at = 0;
  for (; at + kVectors * kWidth <= depth; at += kVectors * kWidth) {
    Lanes sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = from(at + v * kWidth, Whole{});
    for (int64_t i = 0; i < count; ++i) {
      const Lanes weight = broadcast(weights[i]);
      for (int v = 0; v < kVectors; ++v) sums[v] += weight * load_lanes(rows[i] + at + v * kWidth, Whole{});
    }
    for (int v = 0; v < kVectors; ++v) put(at + v * kWidth, sums[v], Whole{});
  }
  across(depth - at, [&](int64_t more, auto cut) {
    Lanes sum = from(at + more, cut);
    for (int64_t i = 0; i < count; ++i) sum += broadcast(weights[i]) * load_lanes(rows[i] + at + more, cut);
    put(at + more, sum, cut);
  });
}

// to += the weighted sum.
template <typename S>
void add_rows(const S* const* rows, const Real* weights, int64_t count, int64_t depth, Real* to) {
  weighted_sum(
      rows, weights, count, depth, [&](int64_t at, auto cut) { return load_lanes(to + at, cut); },
      [&](int64_t at, Lanes x, auto cut) { store_lanes(to + at, x, cut); });
}

}  // namespace turbogr
