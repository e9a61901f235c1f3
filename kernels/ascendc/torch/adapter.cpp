// turbogr's ops for tensors on an NPU: each prepares its arguments and calls the function that CANN's build has made
// from the op's definition. Schemas, fakes and derivatives are declared in Python (kernels/*.py); this adds kernels.
//
// Arguments are prepared as kernels/twin/*.py does, except for what would make the NPU wait: the range of indices is
// looked at only where TURBOGR_NPU_CHECK=1. What a kernel does not take goes to the op's reference, with a warning.
// Inputs without elements do not reach a kernel. In a call of EXEC_NPU_CMD_EXT, names are those of the definition:
// inputs, attributes, outputs (tests/kernels/test_ascendc_names.py). Functionally emulated, not run on an NPU.
#ifndef CURRENT_VERSION
#define CURRENT_VERSION V2R13  // torch_npu's header is for many versions of torch, and does not say which is installed
#endif
#include <npu_cpp_extension.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "../jagged_attention/op_host/jagged_attention_tiling.h"
#include "../jagged_attention_backward/op_host/jagged_attention_backward_tiling.h"
#include "../norm_gate/op_host/norm_gate_tiling.h"
#include "../norm_gate_backward/op_host/norm_gate_backward_tiling.h"
#include "../sampled_softmax/op_host/sampled_softmax_tiling.h"
#include "../sampled_softmax_backward/op_host/sampled_softmax_backward_tiling.h"
#include "../scatter_rows/op_host/scatter_rows_tiling.h"

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// --- what all of them need ------------------------------------------------------------------------------------------

// A kernel reads and writes what sizes say. In a compiled graph the fakes have checked them before.
void require(bool right, const char* what) { TORCH_CHECK_VALUE(right, what); }

bool is_vector(const Tensor& x, int64_t length) { return x.dim() == 1 && x.size(0) == length; }

bool is_vector(const Optional& x, int64_t length) { return !x || is_vector(*x, length); }

// Each text once.
void warn(const std::string& text) {
  static std::mutex once;
  static std::set<std::string> said;
  const std::lock_guard<std::mutex> lock(once);
  if (said.insert(text).second) TORCH_WARN(text);
}

// Runs the op's reference on the same tensors, for the reason given: it is what devices without a kernel have, and
// PrivateUse3 is one of those. Returns the results.
template <typename... Arguments>
torch::jit::Stack reference(const std::string& op, const std::string& why, const Arguments&... arguments) {
  warn("turbogr::" + op + ": the slower reference runs instead of the AscendC kernel, which takes no " + why);
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("turbogr::" + op).c_str(), "");
  torch::jit::Stack stack;
  torch::jit::push(stack, arguments...);
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), &stack);
  return stack;
}

template <size_t... I>
auto tensors_of(const torch::jit::Stack& stack, std::index_sequence<I...>) {
  return std::make_tuple(stack[I].toTensor()...);
}

// The results as a tuple of so many tensors.
template <size_t Count>
auto tensors_of(const torch::jit::Stack& stack) {
  return tensors_of(stack, std::make_index_sequence<Count>());
}

Optional plain(const Optional& x) { return x ? Optional(x->contiguous()) : x; }

Optional cast(const Optional& x, at::ScalarType dtype) { return x ? Optional(x->to(dtype).contiguous()) : x; }

// Dtypes that kernels compute with.
bool computable(const Tensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

void require_range(const char* op, const Tensor& rows, int64_t limit) {
  static const char* asked = std::getenv("TURBOGR_NPU_CHECK");
  if (asked == nullptr || std::string(asked) != "1" || rows.numel() == 0) return;
  const int64_t low = rows.min().item<int64_t>(), high = rows.max().item<int64_t>();
  TORCH_CHECK_INDEX(0 <= low && high < limit, op, ": rows from ", low, " to ", high, ", and there are ", limit);
}

constexpr int64_t kCores = 40;  // for the question below only; the kernel is tiled anew when CANN launches it

// Whether the kernel takes a problem, as its own tiling function says.
template <typename Tiling, typename Problem>
bool takes(const Problem& problem) {
  Tiling tiling;
  return turbogr::Tile(problem, &tiling).blocks > 0;
}

// Bit i is set where gradient i is wanted.
template <typename Flags>
int64_t mask_of(const Flags& flags) {
  int64_t mask = 0;
  for (size_t i = 0; i < flags.size(); ++i) mask |= static_cast<int64_t>(static_cast<bool>(flags[i])) << i;
  return mask;
}

// Room for a gradient; a tensor without elements where nobody wants one.
Tensor room(const Tensor& like, int64_t wanted, int bit) {
  return (wanted >> bit & 1) != 0 ? at::empty(like.sizes(), like.options()) : like.new_empty({0});
}

// --- rows -----------------------------------------------------------------------------------------------------------

// The same bytes in a dtype that the kernel moves: it looks at none of them. Odd numbers of bytes are widened.
Tensor as_words(const Tensor& x) {
  if (computable(x)) return x.contiguous();
  const int64_t bytes = x.size(1) * x.element_size();
  if (bytes % 2 != 0) return x.contiguous().view(at::kByte).to(at::kShort).view(at::kHalf);
  return x.contiguous().view(bytes % 4 != 0 ? at::kHalf : at::kFloat);
}

Tensor from_words(const Tensor& words, at::ScalarType dtype, int64_t width) {
  if (words.scalar_type() == dtype) return words;
  const int64_t bytes = width * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes % 2 != 0 ? words.view(at::kShort).to(at::kByte).view(dtype) : words.view(dtype);
}

std::vector<int64_t> with_rows(at::IntArrayRef shape, int64_t count) {
  std::vector<int64_t> sizes = shape.vec();
  sizes[0] = count;
  return sizes;
}

int64_t width_of(const Tensor& x) { return c10::multiply_integers(x.sizes().slice(1)); }

Tensor gather_rows(Tensor x, Tensor rows) {
  const c10::OptionalDeviceGuard guard(device_of(x));
  require(x.dim() > 0 && rows.dim() == 1, "gather_rows: rows of x by a vector of numbers");
  require_range("gather_rows", rows, x.size(0));
  const std::vector<int64_t> sizes = with_rows(x.sizes(), rows.size(0));
  const int64_t width = width_of(x);
  const at::ScalarType dtype = x.scalar_type();
  if (rows.numel() == 0 || width == 0) return x.new_empty(sizes);
  x = as_words(x.reshape({x.size(0), width}));
  rows = rows.contiguous();
  Tensor y = x.new_empty({rows.size(0), x.size(1)});
  EXEC_NPU_CMD_EXT(aclnnGatherRows, x, rows, y);
  return from_words(y, dtype, width).view(sizes);
}

// What the kernel does not take; empty where it takes all.
std::string refused_by_scatter(const Tensor& x, int64_t entries, int64_t count, int64_t width) {
  if (!computable(x)) return c10::toString(x.scalar_type());
  return turbogr::RowScatterTakes(entries, count, width, x.element_size()) ? "" : "tensors of this size";
}

Tensor scatter_rows(Tensor x, Tensor rows, int64_t count) {
  const c10::OptionalDeviceGuard guard(device_of(x));
  require(x.dim() > 0 && is_vector(rows, x.size(0)) && count >= 0, "scatter_rows: one number for each row of x");
  const std::string why = refused_by_scatter(x, x.size(0), count, width_of(x));
  if (!why.empty()) return reference("scatter_rows", why, x, rows, count)[0].toTensor();
  require_range("scatter_rows", rows, count);
  const std::vector<int64_t> sizes = with_rows(x.sizes(), count);
  if (x.numel() == 0 || count == 0) return x.new_zeros(sizes);
  x = x.reshape({x.size(0), width_of(x)}).contiguous();
  rows = rows.contiguous();
  Tensor y = x.new_empty({count, x.size(1)});
  EXEC_NPU_CMD_EXT(aclnnScatterRows, x, rows, count, y);
  return y.view(sizes);
}

Tensor embedding(Tensor weight, Tensor ids, int64_t padding_idx) {
  const c10::OptionalDeviceGuard guard(device_of(weight));
  require(weight.dim() == 2 && padding_idx < weight.size(0), "embedding: weight has 2 dims, and a row for the padding");
  require_range("embedding", ids, weight.size(0));
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(weight.size(1));
  const int64_t width = weight.size(1);
  const at::ScalarType dtype = weight.scalar_type();
  if (ids.numel() == 0 || width == 0) return weight.new_empty(sizes);
  weight = as_words(weight);
  ids = ids.reshape({-1}).contiguous();
  Tensor y = weight.new_empty({ids.size(0), weight.size(1)});
  EXEC_NPU_CMD_EXT(aclnnEmbeddingRows, weight, ids, padding_idx, y);
  return from_words(y, dtype, width).view(sizes);
}

Tensor embedding_backward(Tensor grad, Tensor ids, int64_t count, int64_t padding_idx) {
  const c10::OptionalDeviceGuard guard(device_of(grad));
  require(grad.dim() == ids.dim() + 1 && grad.numel() == ids.numel() * grad.size(-1) && padding_idx < count,
          "embedding_backward: one row of grad for each id, and a row for the padding");
  const std::string why = refused_by_scatter(grad, ids.numel(), count, grad.size(-1));
  if (!why.empty()) return reference("embedding_backward", why, grad, ids, count, padding_idx)[0].toTensor();
  require_range("embedding_backward", ids, count);
  Tensor y = grad.new_empty({count, grad.size(-1)});
  if (grad.numel() == 0 || count == 0) return y.zero_();
  grad = grad.contiguous();
  ids = ids.contiguous();
  EXEC_NPU_CMD_EXT(aclnnEmbeddingBackward, grad, ids, count, padding_idx, y);
  return y;
}

// --- norm_gate ------------------------------------------------------------------------------------------------------

// What the kernel does not take; empty where it takes all.
template <typename Tiling, typename Problem>
std::string refused_by_norm(const Tensor& x, const Problem& problem) {
  if (!computable(x)) return c10::toString(x.scalar_type());
  return takes<Tiling>(problem) ? "" : "rows of " + std::to_string(x.size(-1)) + " numbers";
}

int64_t rows_before(const Tensor& x) { return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)); }

// Weight and bias in one dtype: that of x, or else float32.
at::ScalarType dtype_of_vectors(const Tensor& x, const Optional& weight, const Optional& bias) {
  const bool same = (!weight || weight->dtype() == x.dtype()) && (!bias || bias->dtype() == x.dtype());
  return same ? x.scalar_type() : at::kFloat;
}

void check_norm(const Tensor& x, const Tensor& gate, const Optional& weight, const Optional& bias) {
  require(x.dim() > 0 && gate.sizes() == x.sizes() && gate.dtype() == x.dtype(), "norm_gate: gate must be like x");
  require(is_vector(weight, x.size(-1)) && is_vector(bias, x.size(-1)), "norm_gate: weight and bias as long as a row");
}

std::tuple<Tensor, Tensor, Tensor> norm_gate(Tensor x, Tensor gate, Optional weight, Optional bias, double eps) {
  const c10::OptionalDeviceGuard guard(device_of(x));
  check_norm(x, gate, weight, bias);
  const turbogr::NormGateProblem problem = {
      rows_before(x), x.size(-1), x.element_size(), weight.has_value(), bias.has_value(), kCores, eps};
  const std::string why = refused_by_norm<turbogr::NormGateTiling>(x, problem);
  if (!why.empty()) return tensors_of<3>(reference("norm_gate", why, x, gate, weight, bias, eps));
  const at::ScalarType dtype = dtype_of_vectors(x, weight, bias);
  x = x.contiguous();
  gate = gate.contiguous();
  weight = cast(weight, dtype);
  bias = cast(bias, dtype);
  Tensor result = at::empty(x.sizes(), x.options());
  Tensor mean = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  Tensor rstd = at::empty_like(mean);
  if (x.numel() != 0) EXEC_NPU_CMD_EXT(aclnnNormGate, x, gate, weight, bias, eps, result, mean, rstd);
  return {result, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_gate_backward(Tensor grad, Tensor x, Tensor gate, Optional weight,
                                                              Optional bias, Tensor mean, Tensor rstd,
                                                              std::array<bool, 4> asked) {
  const c10::OptionalDeviceGuard guard(device_of(x));
  check_norm(x, gate, weight, bias);
  require(grad.sizes() == x.sizes() && grad.dtype() == x.dtype(), "norm_gate_backward: grad must be like x");
  require(mean.numel() == rows_before(x) && rstd.sizes() == mean.sizes(), "norm_gate_backward: statistics of each row");
  const turbogr::NormGateBackwardProblem problem = {
      rows_before(x), x.size(-1), x.element_size(), weight.has_value(), bias.has_value(), mask_of(asked), kCores};
  const std::string why = refused_by_norm<turbogr::NormGateBackwardTiling>(x, problem);
  if (!why.empty()) {
    return tensors_of<4>(reference("norm_gate_backward", why, grad, x, gate, weight, bias, mean, rstd,
                                   c10::List<bool>({asked[0], asked[1], asked[2], asked[3]})));
  }
  const at::ScalarType dtype = dtype_of_vectors(x, weight, bias);
  int64_t wanted = mask_of(asked);
  if (!weight) wanted &= ~int64_t{4};
  if (!bias) wanted &= ~int64_t{8};
  // Vectors that had to be cast have their gradients cast back; those that nobody wants are like x.
  const at::ScalarType weight_dtype = (wanted & 4) != 0 ? weight->scalar_type() : x.scalar_type();
  const at::ScalarType bias_dtype = (wanted & 8) != 0 ? bias->scalar_type() : x.scalar_type();
  grad = grad.contiguous();
  x = x.contiguous();
  gate = gate.contiguous();
  weight = cast(weight, dtype);
  bias = cast(bias, dtype);
  mean = mean.contiguous();
  rstd = rstd.contiguous();
  const Tensor absent = x.new_empty({0}, x.options().dtype(dtype));
  Tensor grad_x = room(x, wanted, 0);
  Tensor grad_gate = room(gate, wanted, 1);
  Tensor grad_weight = room(weight.value_or(absent), wanted, 2);
  Tensor grad_bias = room(bias.value_or(absent), wanted, 3);
  if (x.numel() == 0) {
    return {grad_x, grad_gate, grad_weight.zero_().to(weight_dtype), grad_bias.zero_().to(bias_dtype)};
  }
  EXEC_NPU_CMD_EXT(aclnnNormGateBackward, grad, x, gate, weight, bias, mean, rstd, wanted, grad_x, grad_gate,
                   grad_weight, grad_bias);
  return {grad_x, grad_gate, grad_weight.to(weight_dtype), grad_bias.to(bias_dtype)};
}

// --- sampled_softmax ------------------------------------------------------------------------------------------------

// What the kernel does not take; empty where it takes all.
template <typename Tiling, typename Problem>
std::string refused_by_softmax(const Tensor& query, const Problem& problem) {
  if (!computable(query)) return c10::toString(query.scalar_type());
  return takes<Tiling>(problem) ? "" : "rows of " + std::to_string(query.size(1)) + " numbers, or so many of them";
}

void check_softmax(const Tensor& query, const Tensor& positive, const Tensor& negative, const Tensor& query_offsets,
                   const Tensor& negative_offsets, const Optional& positive_ids, const Optional& negative_ids,
                   const Optional& negative_scales) {
  require(query.dim() == 2 && positive.sizes() == query.sizes() && negative.dim() == 2, "sampled_softmax: 2 dims");
  require(negative.size(1) == query.size(1), "sampled_softmax: rows as wide as those of query");
  require(positive.dtype() == query.dtype() && negative.dtype() == query.dtype(), "sampled_softmax: one dtype");
  require(query_offsets.dim() == 1 && query_offsets.size(0) > 0 && is_vector(negative_offsets, query_offsets.size(0)),
          "sampled_softmax: as many offsets of negatives as of queries");
  require(positive_ids.has_value() == negative_ids.has_value() && is_vector(positive_ids, query.size(0)) &&
              is_vector(negative_ids, negative.size(0)),
          "sampled_softmax: an id for each row");
  require(is_vector(negative_scales, query_offsets.size(0) - 1), "sampled_softmax: a scale for each group");
}

std::tuple<Tensor, Tensor> sampled_softmax(Tensor query, Tensor positive, Tensor negative, Tensor query_offsets,
                                           Tensor negative_offsets, Optional positive_ids, Optional negative_ids,
                                           Optional negative_scales, double scale) {
  const c10::OptionalDeviceGuard guard(device_of(query));
  check_softmax(query, positive, negative, query_offsets, negative_offsets, positive_ids, negative_ids,
                negative_scales);
  const turbogr::SampledSoftmaxProblem problem = {
      query.size(0), negative.size(0), query_offsets.size(0) - 1, query.size(1), query.element_size(),
      negative_ids.has_value(), negative_scales.has_value(), kCores, scale};
  const std::string why = refused_by_softmax<turbogr::SampledSoftmaxTiling>(query, problem);
  if (!why.empty()) {
    return tensors_of<2>(reference("sampled_softmax", why, query, positive, negative, query_offsets, negative_offsets,
                                   positive_ids, negative_ids, negative_scales, scale));
  }
  query = query.contiguous();
  positive = positive.contiguous();
  negative = negative.contiguous();
  query_offsets = query_offsets.contiguous();
  negative_offsets = negative_offsets.contiguous();
  positive_ids = cast(positive_ids, at::kInt);
  negative_ids = cast(negative_ids, at::kInt);
  negative_scales = plain(negative_scales);
  Tensor loss = at::empty({query.size(0)}, query.options().dtype(at::kFloat));
  Tensor log_sum = at::empty_like(loss);
  if (query.numel() != 0) {
    EXEC_NPU_CMD_EXT(aclnnSampledSoftmax, query, positive, negative, query_offsets, negative_offsets, positive_ids,
                     negative_ids, negative_scales, scale, loss, log_sum);
  }
  return {loss, log_sum};
}

std::tuple<Tensor, Tensor, Tensor> sampled_softmax_backward(Tensor grad, Tensor log_sum, Tensor query, Tensor positive,
                                                            Tensor negative, Tensor query_offsets,
                                                            Tensor negative_offsets, Optional positive_ids,
                                                            Optional negative_ids, Optional negative_scales,
                                                            double scale, const c10::List<bool>& asked) {
  const c10::OptionalDeviceGuard guard(device_of(query));
  check_softmax(query, positive, negative, query_offsets, negative_offsets, positive_ids, negative_ids,
                negative_scales);
  require(is_vector(grad, query.size(0)) && is_vector(log_sum, query.size(0)) && asked.size() == 3,
          "sampled_softmax_backward: grad and log_sum of each row");
  int64_t wanted = mask_of(asked);
  const turbogr::SampledSoftmaxBackwardProblem problem = {
      query.size(0), negative.size(0), query_offsets.size(0) - 1, query.size(1), query.element_size(),
      negative_ids.has_value(), negative_scales.has_value(), wanted, kCores, scale};
  const std::string why = refused_by_softmax<turbogr::SampledSoftmaxBackwardTiling>(query, problem);
  if (!why.empty()) {
    return tensors_of<3>(reference("sampled_softmax_backward", why, grad, log_sum, query, positive, negative,
                                   query_offsets, negative_offsets, positive_ids, negative_ids, negative_scales, scale,
                                   asked));
  }
  grad = grad.to(at::kFloat).contiguous();
  log_sum = log_sum.contiguous();
  query = query.contiguous();
  positive = positive.contiguous();
  negative = negative.contiguous();
  query_offsets = query_offsets.contiguous();
  negative_offsets = negative_offsets.contiguous();
  positive_ids = cast(positive_ids, at::kInt);
  negative_ids = cast(negative_ids, at::kInt);
  negative_scales = plain(negative_scales);
  Tensor query_grad = room(query, wanted, 0);
  Tensor positive_grad = room(positive, wanted, 1);
  Tensor negative_grad = room(negative, wanted, 2);
  if (query.numel() == 0) return {query_grad, positive_grad, negative_grad.zero_()};
  EXEC_NPU_CMD_EXT(aclnnSampledSoftmaxBackward, grad, log_sum, query, positive, negative, query_offsets,
                   negative_offsets, positive_ids, negative_ids, negative_scales, scale, wanted, query_grad,
                   positive_grad, negative_grad);
  return {query_grad, positive_grad, negative_grad};
}

// --- jagged_attention -----------------------------------------------------------------------------------------------

constexpr int64_t kNever = (int64_t{1} << 31) - 1;  // a bound that no gap reaches

// Arguments of the op, in the order of its schema.
struct Attention {
  Tensor query, key, value, query_offsets, key_offsets, query_columns, key_columns;
  Optional key_valid, pair_mask, bias, position_bias, time_bias, time_bounds, query_times, key_times, dropout_seed;
  std::string activation;
  double scale, post_scale;
  int64_t min_distance, max_distance;
  double dropout;
  Optional sink;
  double score_cap;

  bool softmax() const { return activation == "softmax"; }

  void check() const {
    require(query.dim() == 3 && key.dim() == 3 && value.dim() == 3, "jagged_attention: rows, heads, features");
    require(key.dtype() == query.dtype() && value.dtype() == query.dtype(), "jagged_attention: one dtype");
    require(key.size(2) == query.size(2) && value.size(0) == key.size(0) && value.size(1) == key.size(1),
            "jagged_attention: sizes of key and value");
    require(key.size(1) > 0 && query.size(1) % key.size(1) == 0, "jagged_attention: heads of query and of key");
    require(softmax() || activation == "silu" || activation == "sigmoid" || activation == "squared_relu" ||
                activation == "linear",
            "jagged_attention: activation is softmax, silu, sigmoid, squared_relu or linear");
    require(is_vector(sink, query.size(1)) && (softmax() || !sink), "jagged_attention: a sink for each head of softmax");
    require(score_cap >= 0 && std::isfinite(score_cap), "jagged_attention: score_cap is above 0, or 0 for none");
    require(query_offsets.dim() == 1 && query_offsets.size(0) > 0 && is_vector(key_offsets, query_offsets.size(0)),
            "jagged_attention: as many offsets of keys as of queries");
    require(is_vector(query_columns, query.size(0)) && is_vector(key_columns, key.size(0)) &&
                is_vector(query_times, query.size(0)) && is_vector(key_times, key.size(0)) &&
                is_vector(key_valid, key.size(0)),
            "jagged_attention: columns, times and validity of each row");
    const int64_t sequences = query_offsets.size(0) - 1, heads = query.size(1);
    for (const Optional& x : {pair_mask, bias}) {
      require(!x || (x->dim() == 4 && one_or(x->size(0), sequences) && one_or(x->size(1), heads)),
              "jagged_attention: sequences and heads of pair_mask and bias");
    }
    for (const Optional& x : {position_bias, time_bias}) {
      require(!x || (x->dim() == 2 && one_or(x->size(0), heads)), "jagged_attention: heads of a table");
    }
    require(!position_bias || position_bias->size(1) % 2 == 1, "jagged_attention: 2M - 1 entries by distance");
    const bool timed = time_bias.has_value();
    require(time_bounds.has_value() == timed && query_times.has_value() == timed && key_times.has_value() == timed &&
                (!timed || is_vector(time_bounds, time_bias->size(1) - 1)),
            "jagged_attention: time_bias, its bounds and the times come together");
  }

  turbogr::AttentionProblem problem(int64_t wanted) const {
    turbogr::AttentionProblem p{};
    p.sequences = query_offsets.numel() - 1;
    p.queryRows = query.size(0);
    p.keyRows = key.size(0);
    p.heads = query.size(1);
    p.groups = key.size(1);
    p.depth = query.size(2);
    p.valueDepth = value.size(2);
    p.bytes = query.element_size();
    p.indexBytes = query_offsets.element_size();
    p.softmax = softmax();
    p.hasValid = key_valid.has_value();
    p.positionEntries = position_bias ? position_bias->size(1) : 0;
    p.positionHeads = position_bias ? position_bias->size(0) : 0;
    p.timeBounds = time_bounds ? time_bounds->numel() : 0;
    p.timeHeads = time_bias ? time_bias->size(0) : 0;
    p.minDistance = min_distance;
    p.maxDistance = max_distance;
    p.bias = sizes_of(bias);
    p.mask = sizes_of(pair_mask);
    p.hasSeed = dropout_seed.has_value();
    if (bias) {
      const std::vector<int64_t> sizes = sizes_of_bias_grad();
      p.gradSequences = sizes[0];
      p.gradHeads = sizes[1];
    }
    p.wanted = wanted;
    p.deterministic = at::globalContext().deterministicAlgorithms();
    p.cores = kCores;
    p.scale = scale;
    p.postScale = post_scale;
    p.dropout = dropout;
    return p;
  }

  // What the kernels do not take; empty where they take all.
  template <typename Tiling>
  std::string refused(int64_t wanted) const {
    if (!computable(query)) return c10::toString(query.scalar_type());
    const std::string lacking = turbogr::Lacking(activation.c_str(), sink.has_value(), score_cap);
    if (!lacking.empty()) return lacking;
    // How many keys there are is known to the device alone.
    for (const Optional& x : {pair_mask, bias}) {
      if (x && x->size(3) <= 1) return "mask or bias that all keys share";
    }
    return takes<Tiling>(problem(wanted)) ? "" : "tensors of these sizes";
  }

  // Of what the kernel writes: sums over sequences and heads come later where their order matters.
  std::vector<int64_t> sizes_of_bias_grad() const {
    std::vector<int64_t> sizes = bias->sizes().vec();
    if (at::globalContext().deterministicAlgorithms()) {
      sizes[0] = query_offsets.numel() - 1;
      sizes[1] = query.size(1);
    }
    return sizes;
  }

  // Tensors as the kernels take them.
  void prepare() {
    for (const Optional& x : {pair_mask, bias}) {
      if (!x) continue;
      if (x->size(2) > 1) require_range("jagged_attention: columns of queries", query_columns, x->size(2));
      require_range("jagged_attention: columns of keys", key_columns, x->size(3));
    }
    for (Tensor* x : {&query, &key, &value, &query_offsets, &key_offsets, &query_columns, &key_columns}) {
      *x = x->contiguous();
    }
    key_valid = plain(key_valid);
    pair_mask = plain(pair_mask);
    bias = cast(bias, at::kFloat);
    position_bias = cast(position_bias, at::kFloat);
    time_bias = cast(time_bias, at::kFloat);
    if (time_bounds) time_bounds = time_bounds->clamp(0, kNever).to(at::kInt).contiguous();
    if (query_times && key_times) make_times_relative();
    dropout_seed = plain(dropout_seed);
    sink = cast(sink, at::kFloat);
  }

 private:
  static bool one_or(int64_t found, int64_t size) { return found == 1 || found == size; }

  static turbogr::PairSizes sizes_of(const Optional& table) {
    if (!table) return {};
    return {table->size(0), table->size(1), table->size(2), table->size(3)};
  }

  // Times in 32 bits, relative to that of the first key of the same sequence.
  void make_times_relative() {
    if (key_times->numel() == 0) {
      query_times = at::zeros_like(*query_times, query_times->options().dtype(at::kInt));
      key_times = key_times->to(at::kInt);
      return;
    }
    const Tensor origins = key_times->index_select(0, key_offsets.clamp(0, key_times->numel() - 1));
    query_times = relative(*query_times, query_offsets, origins);
    key_times = relative(*key_times, key_offsets, origins);
  }

  static Tensor relative(const Tensor& times, const Tensor& offsets, const Tensor& origins) {
    const Tensor rows = at::arange(times.numel(), offsets.options());
    const Tensor sequences = (at::searchsorted(offsets, rows, false, true) - 1).clamp_min(0);
    const int64_t far = turbogr::kFarTime;
    return (times - origins.index_select(0, sequences)).clamp(-far, far).to(at::kInt).contiguous();
  }
};

std::tuple<Tensor, Tensor> jagged_attention(
    Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor key_offsets, Tensor query_columns,
    Tensor key_columns, Optional key_valid, Optional pair_mask, Optional bias, Optional position_bias,
    Optional time_bias, Optional time_bounds, Optional query_times, Optional key_times, Optional dropout_seed,
    std::string kind, double scale, double post_scale, int64_t min_distance, int64_t max_distance, double dropout,
    Optional sink, double score_cap) {
  const c10::OptionalDeviceGuard guard(device_of(query));
  Attention a = {query, key, value, query_offsets, key_offsets, query_columns, key_columns, key_valid, pair_mask, bias,
                 position_bias, time_bias, time_bounds, query_times, key_times, dropout_seed, kind, scale,
                 post_scale, min_distance, max_distance, dropout, sink, score_cap};
  a.check();
  const std::string why = a.refused<turbogr::JaggedAttentionTiling>(0);
  if (!why.empty()) {
    return tensors_of<2>(reference("jagged_attention", why, query, key, value, query_offsets, key_offsets,
                                   query_columns, key_columns, key_valid, pair_mask, bias, position_bias, time_bias,
                                   time_bounds, query_times, key_times, dropout_seed, kind, scale, post_scale,
                                   min_distance, max_distance, dropout, sink, score_cap));
  }
  Tensor result = query.new_empty({query.size(0), query.size(1), value.size(2)});
  const std::vector<int64_t> sums = a.softmax() ? query.sizes().slice(0, 2).vec() : std::vector<int64_t>{0};
  Tensor log_sum = at::empty(sums, query.options().dtype(at::kFloat));
  if (result.numel() == 0 || key.numel() == 0) {
    return {result.zero_(), log_sum.fill_(std::numeric_limits<float>::infinity())};
  }
  a.prepare();
  char* activation = a.activation.data();
  EXEC_NPU_CMD_EXT(aclnnJaggedAttention, a.query, a.key, a.value, a.query_offsets, a.key_offsets, a.query_columns,
                   a.key_columns, a.key_valid, a.pair_mask, a.bias, a.position_bias, a.time_bias, a.time_bounds,
                   a.query_times, a.key_times, a.dropout_seed, a.sink, activation, a.scale, a.post_scale, a.min_distance,
                   a.max_distance, a.dropout, a.score_cap, result, log_sum);
  return {result, log_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> jagged_attention_backward(
    Tensor grad, Tensor result, Tensor log_sum, Tensor query, Tensor key, Tensor value, Tensor query_offsets,
    Tensor key_offsets, Tensor query_columns, Tensor key_columns, Optional key_valid, Optional pair_mask, Optional bias,
    Optional position_bias, Optional time_bias, Optional time_bounds, Optional query_times, Optional key_times,
    Optional dropout_seed, std::string kind, double scale, double post_scale, int64_t min_distance,
    int64_t max_distance, double dropout, Optional sink, double score_cap, const c10::List<bool>& asked) {
  const c10::OptionalDeviceGuard guard(device_of(query));
  Attention a = {query, key, value, query_offsets, key_offsets, query_columns, key_columns, key_valid, pair_mask, bias,
                 position_bias, time_bias, time_bounds, query_times, key_times, dropout_seed, kind, scale,
                 post_scale, min_distance, max_distance, dropout, sink, score_cap};
  int64_t wanted = mask_of(asked);
  a.check();
  require(grad.dim() == 3 && grad.size(0) == query.size(0) && grad.size(1) == query.size(1) &&
              grad.size(2) == value.size(2) && result.sizes() == grad.sizes() && grad.dtype() == query.dtype() &&
              result.dtype() == query.dtype() && asked.size() == 7,
          "jagged_attention_backward: grad and result like the result");
  require(log_sum.numel() == (a.softmax() ? query.size(0) * query.size(1) : 0), "jagged_attention_backward: log_sum");
  const Optional given[] = {query, key, value, bias, position_bias, time_bias, sink};
  for (int bit = 0; bit < 7; ++bit) {
    if (!given[bit]) wanted &= ~(int64_t{1} << bit);
  }
  const std::string why = a.refused<turbogr::JaggedAttentionBackwardTiling>(wanted);
  if (!why.empty()) {
    return tensors_of<7>(reference("jagged_attention_backward", why, grad, result, log_sum, query, key, value,
                                   query_offsets, key_offsets, query_columns, key_columns, key_valid, pair_mask, bias,
                                   position_bias, time_bias, time_bounds, query_times, key_times, dropout_seed,
                                   kind, scale, post_scale, min_distance, max_distance, dropout, sink, score_cap,
                                   asked));
  }
  const auto is_wanted = [&wanted](int bit) { return (wanted >> bit & 1) != 0; };
  const at::TensorOptions wide = query.options().dtype(at::kFloat);  // where biases add up
  const auto sum_room = [&](int bit) {
    return is_wanted(bit) ? at::empty(given[bit]->sizes(), wide) : at::empty({0}, wide);
  };
  Tensor query_grad = room(query, wanted, 0), key_grad = room(key, wanted, 1), value_grad = room(value, wanted, 2);
  Tensor bias_grad = is_wanted(3) ? at::empty(a.sizes_of_bias_grad(), wide) : at::empty({0}, wide);
  Tensor position_bias_grad = sum_room(4), time_bias_grad = sum_room(5), sink_grad = sum_room(6);
  if (query.numel() == 0 || key.numel() == 0) {  // nobody sees anything
    for (Tensor* x :
         {&query_grad, &key_grad, &value_grad, &bias_grad, &position_bias_grad, &time_bias_grad, &sink_grad}) {
      x->zero_();
    }
  } else if (wanted != 0) {
    a.prepare();
    grad = grad.contiguous();
    result = result.contiguous();
    log_sum = log_sum.contiguous();
    char* activation = a.activation.data();
    EXEC_NPU_CMD_EXT(aclnnJaggedAttentionBackward, grad, result, log_sum, a.query, a.key, a.value, a.query_offsets,
                     a.key_offsets, a.query_columns, a.key_columns, a.key_valid, a.pair_mask, a.bias, a.position_bias,
                     a.time_bias, a.time_bounds, a.query_times, a.key_times, a.dropout_seed, a.sink, activation,
                     a.scale, a.post_scale, a.min_distance, a.max_distance, a.dropout, a.score_cap, wanted, query_grad,
                     key_grad, value_grad, bias_grad, position_bias_grad, time_bias_grad, sink_grad);
  }
  // A gradient in the shape and dtype of what it is of; a tensor without elements where nobody wants one.
  const auto narrow = [&](const Tensor& sum, int bit) {
    return is_wanted(bit) ? sum.sum_to_size(given[bit]->sizes()).to(given[bit]->scalar_type()) : query.new_empty({0});
  };
  return {query_grad, key_grad, value_grad, narrow(bias_grad, 3), narrow(position_bias_grad, 4),
          narrow(time_bias_grad, 5), narrow(sink_grad, 6)};
}

}  // namespace

TORCH_LIBRARY_IMPL(turbogr, PrivateUse1, m) {
  m.impl("gather_rows", &gather_rows);
  m.impl("scatter_rows", &scatter_rows);
  m.impl("embedding", &embedding);
  m.impl("embedding_backward", &embedding_backward);
  m.impl("norm_gate", &norm_gate);
  m.impl("norm_gate_backward", &norm_gate_backward);
  m.impl("jagged_attention", &jagged_attention);
  m.impl("jagged_attention_backward", &jagged_attention_backward);
  m.impl("sampled_softmax", &sampled_softmax);
  m.impl("sampled_softmax_backward", &sampled_softmax_backward);
}
