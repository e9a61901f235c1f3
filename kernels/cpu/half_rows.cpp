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

#if defined(TURBOGR_HALVES)

// The least power of two that leaves all finite numbers below 2^15; not below 2^-100, so that it has an inverse.
float scale_for(float most) {
  int exponent = 0;
  std::frexp(most, &exponent);
  return most == 0 ? 1.0f : std::ldexp(1.0f, std::max(exponent - 15, -100));
}

void narrow_segment(const HalfRowsArguments& a, int64_t first, int64_t last, float* scale) {
  const auto row = [&](int64_t i) { return a.rows + (a.places == nullptr ? i : a.places[i]) * a.stride; };
  const float infinite = std::numeric_limits<float>::infinity();
  Lanes most = {};
  for (int64_t i = first; i < last; ++i)
    across(a.depth, [&](int64_t at, auto cut) {
      const Lanes x = load_lanes(row(i) + at, cut), size = x < 0.0f ? -x : x;
      most = larger(size < infinite ? size : Lanes{}, most);
    });
  *scale = scale_for(maximum<Real>(most));
  const Lanes inverse = broadcast(1 / *scale);
  for (int64_t i = first; i < last; ++i)
    across(a.depth, [&](int64_t at, auto cut) {
      store_lanes((Half*)a.halves + i * a.depth + at, load_lanes(row(i) + at, cut) * inverse, cut);
    });
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

}  // namespace turbogr
