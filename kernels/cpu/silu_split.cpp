// SiLU of rows, cut into parts, and its derivative: one pass each.
#include <limits>

#include "rowwise.h"

namespace turbogr {
namespace {

struct SiluSplitArguments {
  const void* x;
  void* result;        // of the backward
  void* const* parts;  // results of the forward, gradients for the backward
  const int64_t* sizes;
  const int64_t* strides;
  int64_t rows, width, stride, count, type, threads;
};

// The sigmoid of -log(power); zero where it is below the smallest normal number, so that -inf · 0 is NaN as in eager.
TURBOGR_INLINE Lanes share_of(Lanes power) {
  return power > 1 / std::numeric_limits<Real>::min() ? zeros<Real>() : Real(1) / (Real(1) + power);
}

template <typename S>
void forward(const SiluSplitArguments& a, S*) {
  for_rows(a.rows, rows_per_chunk(a.width), a.threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const S* x = (const S*)a.x + row * a.stride;
      prefetch_ahead(x, a.stride, a.width);
      for (int64_t part = 0; part < a.count; x += a.sizes[part++]) {
        S* to = (S*)a.parts[part] + row * a.strides[part];
        across(a.sizes[part], [&](int64_t at, auto cut) {
          const Lanes value = load_lanes(x + at, cut);
          store_lanes(to + at, value * share_of(exp(-value)), cut);
        });
      }
    }
  });
}

template <typename S>
void backward(const SiluSplitArguments& a, S*) {
  for_rows(a.rows, rows_per_chunk(a.width), a.threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const S* x = (const S*)a.x + row * a.stride;
      prefetch_ahead(x, a.stride, a.width);
      S* to = (S*)a.result + row * a.width;
      for (int64_t part = 0; part < a.count; ++part) {
        const S* slopes = (const S*)a.parts[part] + row * a.strides[part];
        prefetch_ahead(slopes, a.strides[part], a.sizes[part]);
        across(a.sizes[part], [&](int64_t at, auto cut) {
          const Lanes value = load_lanes(x + at, cut), slope = load_lanes(slopes + at, cut);
          const Lanes power = exp_or_zero(-value), share = share_of(power);
          // 1 - share, without the difference of two numbers close to 1. Where power overflows, it is 1.
          const Lanes rest = smaller(power * share, broadcast(Real(1)));
          store_lanes(to + at, slope * share * (Real(1) + value * rest), cut);
        });
        x += a.sizes[part];
        to += a.sizes[part];
      }
    }
  });
}

}  // namespace

extern "C" const char* turbogr_silu_split(const SiluSplitArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { forward(*a, storage); });
  });
}

extern "C" const char* turbogr_silu_split_backward(const SiluSplitArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { backward(*a, storage); });
  });
}

}  // namespace turbogr
