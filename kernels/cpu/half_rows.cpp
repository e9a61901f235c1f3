// Rows narrowed to 16 bits, after a division by a power of two that all rows of a segment share.
#include <limits>

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
  Half* halves;
  float* scales;     // of blocks
  int8_t* sizes;     // of rows: the power of two that each would have alone
  uint8_t* changed;  // of blocks, zero: whether a row in it has another size than before
  int64_t total, depth, stride, block, count, threads;
};

#if defined(TURBOGR_HALVES)

constexpr int kLeastSize = -100, kSizeOfZero = -128;

// The power of two that is the least one to leave all finite numbers below 2^15; not below 2^-100, so that it has an
// inverse. kSizeOfZero for zeros, whose scale is 1.
int size_for(float most) {
  int exponent = 0;
  std::frexp(most, &exponent);
  return most == 0 ? kSizeOfZero : std::max(exponent - 15, kLeastSize);
}

float scale_of(int size) { return size == kSizeOfZero ? 1.0f : std::ldexp(1.0f, size); }

TURBOGR_INLINE Lanes largest_finite(const Real* row, int64_t depth, Lanes most) {
  const float infinite = std::numeric_limits<float>::infinity();
  across(depth, [&](int64_t at, auto cut) {
    const Lanes x = load_lanes(row + at, cut), size = x < 0.0f ? -x : x;
    most = larger(size < infinite ? size : Lanes{}, most);
  });
  return most;
}

TURBOGR_INLINE void narrow_row(const Real* row, int64_t depth, Lanes inverse, Half* to) {
  across(depth, [&](int64_t at, auto cut) { store_lanes(to + at, load_lanes(row + at, cut) * inverse, cut); });
}

void narrow_segment(const HalfRowsArguments& a, int64_t first, int64_t last, float* scale) {
  const auto row = [&](int64_t i) { return a.rows + (a.places == nullptr ? i : a.places[i]) * a.stride; };
  Lanes most = {};
  for (int64_t i = first; i < last; ++i) most = largest_finite(row(i), a.depth, most);
  *scale = scale_of(size_for(maximum<Real>(most)));
  const Lanes inverse = broadcast(1 / *scale);
  for (int64_t i = first; i < last; ++i) narrow_row(row(i), a.depth, inverse, (Half*)a.halves + i * a.depth);
}

// --- a copy that follows its table ---

// Rows by the scale that their block had. Where that changes, they are narrowed again.
void follow_rows(const HalfCopyArguments& a, int64_t first, int64_t last) {
  constexpr int64_t ahead = 8, line = 64 / int64_t(sizeof(Real));
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < last)
      for (int64_t at = 0; at < std::min<int64_t>(a.depth, 16 * line); at += line)
        __builtin_prefetch(a.table + a.rows[i + ahead] * a.stride + at);
    const int64_t row = a.rows[i], block = row / a.block;
    const Real* from = a.table + row * a.stride;
    const int8_t size = int8_t(size_for(maximum<Real>(largest_finite(from, a.depth, Lanes{}))));
    if (size != a.sizes[row]) {
      a.sizes[row] = size;
      __atomic_store_n(a.changed + block, 1, __ATOMIC_RELAXED);
    }
    narrow_row(from, a.depth, broadcast(1 / a.scales[block]), a.halves + row * a.depth);
  }
}

void follow_block(const HalfCopyArguments& a, int64_t block) {
  const int64_t first = block * a.block, last = std::min(first + a.block, a.total);
  if (a.rows == nullptr) {
    for (int64_t i = first; i < last; ++i)
      a.sizes[i] = int8_t(size_for(maximum<Real>(largest_finite(a.table + i * a.stride, a.depth, Lanes{}))));
  } else if (!a.changed[block]) {
    return;
  }
  const float scale = scale_of(*std::max_element(a.sizes + first, a.sizes + last));
  if (a.rows != nullptr && scale == a.scales[block]) return;
  a.scales[block] = scale;
  for (int64_t i = first; i < last; ++i)
    narrow_row(a.table + i * a.stride, a.depth, broadcast(1 / scale), a.halves + i * a.depth);
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
    constexpr int64_t some = 64;  // blocks that are worth a thread's trip, most of which have not changed
    const int64_t blocks = (a->total + a->block - 1) / a->block;
    if (a->rows != nullptr)
      for_rows(a->count, rows_per_chunk(a->depth), a->threads,
               [&](int64_t first, int64_t last) { follow_rows(*a, first, last); });
    for_rows(blocks, some, a->threads, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) follow_block(*a, block);
    });
    return nullptr;
#else
    (void)a;
    return failure("no kernel for 16 bits in this library");
#endif
  });
}

}  // namespace turbogr
