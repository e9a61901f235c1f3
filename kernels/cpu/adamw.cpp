// AdamW on parameters and moments of 16 bits, rounded by chance: one pass over four tensors.
#include "rowwise.h"

namespace turbogr {
namespace {

struct AdamWArguments {
  BFloat* value;
  const BFloat* gradient;
  BFloat* mean;
  BFloat* square;
  int64_t count, seed, threads;
  double first, second, rate, keep, correction, eps;  // rate: of the corrected mean; keep: what decay leaves
};

#if defined(TURBOGR_HALVES)

using Words = Vector<uint32_t>;

TURBOGR_INLINE Words mixed(Words x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Adds 16 bits of chance below those that are kept, and cuts. What is not finite stays.
TURBOGR_INLINE Lanes by_chance(Lanes x, Words chance) {
  const Words b = (Words)x, rounded = (b + (chance & 0xffff)) & 0xffff0000u;
  return (b & 0x7f800000) == 0x7f800000 ? x : (Lanes)rounded;
}

TURBOGR_INLINE Lanes root_of(Lanes x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_sqrt_ps((__m256)x);
#else
  for (int lane = 0; lane < kWidth; ++lane) x[lane] = std::sqrt(x[lane]);
  return x;
#endif
}

void update(const AdamWArguments& a, int64_t start, int64_t end) {
  const float first = float(a.first), second = float(a.second), rate = float(a.rate), keep = float(a.keep);
  const float eps = float(a.eps), correction = float(a.correction);
  const Words low = broadcast(uint32_t(a.seed)), high = broadcast(uint32_t(uint64_t(a.seed) >> 32));
  across(end - start, [&](int64_t offset, auto cut) {
    const int64_t at = start + offset;
    const Lanes gradient = load_lanes(a.gradient + at, cut), before = load_lanes(a.mean + at, cut);
    const Lanes mean = before + first * (gradient - before);
    const Lanes square = load_lanes(a.square + at, cut) * (1 - second) + gradient * gradient * second;
    const Lanes root = root_of(square / correction) + eps;
    const Lanes value = load_lanes(a.value + at, cut) * keep - rate * (mean / root);
    const Words chance = mixed(mixed(broadcast(uint32_t(at)) + iota<uint32_t>() + low) ^ high);
    store_lanes(a.value + at, by_chance(value, chance), cut);
    store_lanes(a.mean + at, by_chance(mean, chance >> 16), cut);
    store_lanes(a.square + at, by_chance(square, mixed(chance + 0x9e3779b9u)), cut);
  });
}

#endif

}  // namespace

extern "C" const char* turbogr_adamw_by_chance(const AdamWArguments* a) {
  return guarded([&]() -> const char* {
#if defined(TURBOGR_HALVES)
    for_rows(a->count, kChunk, a->threads, [&](int64_t first, int64_t last) { update(*a, first, last); });
    return nullptr;
#else
    (void)a;
    return failure("no kernel for 16 bits in this library");
#endif
  });
}

}  // namespace turbogr
