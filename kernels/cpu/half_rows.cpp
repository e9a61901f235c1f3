// Rows narrowed to 16 bits, after a division by a power of two that all rows of a segment share.
#include "half_copy.h"
#include "lookup.h"

namespace turbogr {
namespace {

struct HalfRowsArguments {
  const Real* rows;
  const int64_t* places;    // row of each entry; null: entries are all rows
  const int64_t* offsets;   // first entry of each segment, and the end; null: segments of `block` entries
  const int64_t* segments;  // those that are asked for; null: all
  void* halves;             // entries x depth
  float* scales;            // of segments
  int64_t entries, depth, stride, block, count, threads;  // count of segments that are asked for
};

struct HalfCopyArguments {
  const Real* table;
  const int64_t* rows;  // those that have changed, each once; null: all
  HalfCopy copy;
  int64_t total, depth, stride, block, count, threads;
};

#if defined(TURBOGR_HALVES)

void narrow_segment(const HalfRowsArguments& a, int64_t first, int64_t last, float* scale) {
  const auto row = [&](int64_t i) { return a.rows + (a.places == nullptr ? i : a.places[i]) * a.stride; };
  Lanes most = {};
  for (int64_t i = first; i < last; ++i) most = largest_finite(row(i), a.depth, most);
  *scale = scale_of(size_for(largest_of(most)));
  const Lanes inverse = broadcast(1 / *scale);
  for (int64_t i = first; i < last; ++i) narrow_row(row(i), a.depth, inverse, (Half*)a.halves + i * a.depth);
}

// --- a copy that follows its table ---

void follow_rows(const HalfCopyArguments& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    if (i + kRowsAhead < last) prefetch_row(a.table + a.rows[i + kRowsAhead] * a.stride, a.depth);
    const int64_t row = a.rows[i];
    follow_row(a.copy, row, a.block, a.table + row * a.stride, a.depth);
  }
  stream_end();
}

// Blocks of a copy of all rows.
void copy_block(const HalfCopyArguments& a, int64_t block) {
  const int64_t first = block * a.block, last = std::min(first + a.block, a.total);
  for (int64_t i = first; i < last; ++i)
    a.copy.sizes[i] = int8_t(size_for(largest_of(largest_finite(a.table + i * a.stride, a.depth, Lanes{}))));
  scale_block(a.copy, first, last, block, a.table, a.stride, a.depth);
}

#endif

}  // namespace

extern "C" const char* turbogr_half_rows(const HalfRowsArguments* a) {
  return guarded([&]() -> const char* {
#if defined(TURBOGR_HALVES)
    parallel_for(a->count, a->threads, [&](int64_t i) {
      const int64_t s = a->segments == nullptr ? i : a->segments[i];
      const int64_t first = a->offsets == nullptr ? s * a->block : a->offsets[s];
      const int64_t last = a->offsets == nullptr ? std::min(first + a->block, a->entries) : a->offsets[s + 1];
      narrow_segment(*a, first, last, a->scales + s);
    });
    return nullptr;
#else
    (void)a;
    return failure("no kernel for 16 bits in this library");
#endif
  });
}

extern "C" const char* turbogr_half_copy(const HalfCopyArguments* a) {
  return guarded([&]() -> const char* {
#if defined(TURBOGR_HALVES)
    if (a->rows == nullptr) {
      parallel_for((a->total + a->block - 1) / a->block, a->threads, [&](int64_t block) { copy_block(*a, block); });
      return nullptr;
    }
    for_rows(a->count, rows_per_chunk(a->depth), a->threads,
             [&](int64_t first, int64_t last) { follow_rows(*a, first, last); });
    scale_changed(a->copy, a->total, a->block, a->table, a->stride, a->depth, a->threads);
    return nullptr;
#else
    (void)a;
    return failure("no kernel for 16 bits in this library");
#endif
  });
}

}  // namespace turbogr
