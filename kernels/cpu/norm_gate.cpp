// Layer norm of rows times a gate, and its derivative: each row comes from memory once.
#include "rowwise.h"

namespace turbogr {
namespace {

struct NormGateArguments {
  const void *x, *gate;
  const Real *weight, *bias;
  void* result;
  Real *mean, *rstd;
  int64_t rows, width, x_stride, gate_stride, type, threads;
  double eps;
};

struct NormGateBackwardArguments {
  const void *grad, *x, *gate;
  const Real *weight, *bias, *mean, *rstd;
  void *grad_x, *grad_gate;
  Real *grad_weight, *grad_bias;
  int64_t rows, width, grad_stride, x_stride, gate_stride, type, threads;
};

// A vector of the weight or the bias; what stands for one that is absent is a constant.
template <typename Cut>
TURBOGR_INLINE Lanes load_or(const Real* from, int64_t at, Cut cut, Real absent) {
  return from == nullptr ? broadcast(absent) : load_lanes(from + at, cut);
}

template <typename S>
void forward(const NormGateArguments& a, S*) {
  const Real share = Real(1) / Real(a.width);
  for_rows(a.rows, rows_per_chunk(a.width), a.threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const S *x = (const S*)a.x + row * a.x_stride, *gate = (const S*)a.gate + row * a.gate_stride;
      S* result = (S*)a.result + row * a.width;
      prefetch_ahead(x, a.x_stride, a.width);
      prefetch_ahead(gate, a.gate_stride, a.width);
      const Real mean = share * total(a.width, [&](int64_t at, auto cut) { return load_lanes(x + at, cut); });
      const Real variance = share * total(a.width, [&](int64_t at, auto cut) {
                              const Lanes distance = kept(load_lanes(x + at, cut) - mean, cut);
                              return distance * distance;
                            });
      const Real rstd = Real(1) / std::sqrt(variance + Real(a.eps));
      across(a.width, [&](int64_t at, auto cut) {
        const Lanes normal = (load_lanes(x + at, cut) - mean) * rstd;
        const Lanes scaled = normal * load_or(a.weight, at, cut, 1) + load_or(a.bias, at, cut, 0);
        store_lanes(result + at, scaled * load_lanes(gate + at, cut), cut);
      });
      a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  });
}

// Gradients of a row; what it adds to those of weight and bias goes to the sums.
template <typename S>
void backward_row(const NormGateBackwardArguments& a, int64_t row, Real share, Real* weight_sums, Real* bias_sums) {
  const S* grad = (const S*)a.grad + row * a.grad_stride;
  const S* x = (const S*)a.x + row * a.x_stride;
  const S* gate = (const S*)a.gate + row * a.gate_stride;
  S* grad_x = a.grad_x == nullptr ? nullptr : (S*)a.grad_x + row * a.width;
  S* grad_gate = a.grad_gate == nullptr ? nullptr : (S*)a.grad_gate + row * a.width;
  prefetch_ahead(grad, a.grad_stride, a.width);
  prefetch_ahead(x, a.x_stride, a.width);
  prefetch_ahead(gate, a.gate_stride, a.width);
  const Real mean = a.mean[row], rstd = a.rstd[row];
  Lanes slopes = {}, moments = {};
  across(a.width, [&](int64_t at, auto cut) {
    const Lanes incoming = load_lanes(grad + at, cut), weight = load_or(a.weight, at, cut, 1);
    const Lanes normal = (load_lanes(x + at, cut) - mean) * rstd;
    const Lanes slope = incoming * load_lanes(gate + at, cut);  // zero behind the end of the row
    if (grad_gate != nullptr)
      store_lanes(grad_gate + at, incoming * (normal * weight + load_or(a.bias, at, cut, 0)), cut);
    slopes += slope * weight;
    moments += slope * weight * normal;
    store_lanes(weight_sums + at, load_lanes(weight_sums + at, cut) + slope * normal, cut);
    store_lanes(bias_sums + at, load_lanes(bias_sums + at, cut) + slope, cut);
  });
  if (grad_x == nullptr) return;
  const Real slope_mean = share * sum<Real>(slopes), moment_mean = share * sum<Real>(moments);
  across(a.width, [&](int64_t at, auto cut) {
    const Lanes slope = load_lanes(grad + at, cut) * load_lanes(gate + at, cut);
    const Lanes normal = (load_lanes(x + at, cut) - mean) * rstd;
    const Lanes inner = slope * load_or(a.weight, at, cut, 1);
    store_lanes(grad_x + at, (inner - slope_mean - normal * moment_mean) * rstd, cut);
  });
}

// Sums over rows: first within chunks, whose size depends on the sizes of the tensor alone, then over chunks in order.
template <typename S>
void backward(const NormGateBackwardArguments& a, S*) {
  const int64_t per_chunk = std::max(std::min<int64_t>(256, rows_per_chunk(a.width)), (a.rows + 255) / 256);
  const int64_t chunks = (a.rows + per_chunk - 1) / per_chunk;
  static thread_local Scratch scratch;
  Real* sums = (Real*)scratch.room(size_t(chunks * 2 * a.width) * sizeof(Real));
  for_rows(a.rows, per_chunk, a.threads, [&](int64_t first, int64_t last) {
    Real *weight_sums = sums + first / per_chunk * 2 * a.width, *bias_sums = weight_sums + a.width;
    std::fill_n(weight_sums, 2 * a.width, Real(0));
    for (int64_t row = first; row < last; ++row)
      backward_row<S>(a, row, Real(1) / Real(a.width), weight_sums, bias_sums);
  });
  Real* const into[] = {a.grad_weight, a.grad_bias};
  for (int64_t part = 0; part < 2; ++part) {
    if (into[part] == nullptr) continue;
    across(a.width, [&](int64_t at, auto cut) {
      Lanes all = {};
      for (int64_t chunk = 0; chunk < chunks; ++chunk) all += load_lanes(sums + (2 * chunk + part) * a.width + at, cut);
      store_lanes(into[part] + at, all, cut);
    });
  }
}

}  // namespace

extern "C" const char* turbogr_norm_gate(const NormGateArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { forward(*a, storage); });
  });
}

extern "C" const char* turbogr_norm_gate_backward(const NormGateBackwardArguments* a) {
  return guarded([&]() -> const char* {
    return for_storage(a->type, [&](auto* storage) { backward(*a, storage); });
  });
}

}  // namespace turbogr
