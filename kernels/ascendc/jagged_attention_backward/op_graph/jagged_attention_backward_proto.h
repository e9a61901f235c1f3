#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Gradients of attention over packed sequences. See README.md.
REG_OP(JaggedAttentionBackward)
    .INPUT(grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(result, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(log_sum, TensorType({DT_FLOAT}))
    .INPUT(query, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(key, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(value, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(query_offsets, TensorType({DT_INT32, DT_INT64}))
    .INPUT(key_offsets, TensorType({DT_INT32, DT_INT64}))
    .INPUT(query_columns, TensorType({DT_INT32, DT_INT64}))
    .INPUT(key_columns, TensorType({DT_INT32, DT_INT64}))
    .OPTIONAL_INPUT(key_valid, TensorType({DT_BOOL}))
    .OPTIONAL_INPUT(pair_mask, TensorType({DT_BOOL}))
    .OPTIONAL_INPUT(bias, TensorType({DT_FLOAT}))
    .OPTIONAL_INPUT(position_bias, TensorType({DT_FLOAT}))
    .OPTIONAL_INPUT(time_bias, TensorType({DT_FLOAT}))
    .OPTIONAL_INPUT(time_bounds, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(query_times, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(key_times, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(dropout_seed, TensorType({DT_INT64}))
    .OPTIONAL_INPUT(sink, TensorType({DT_FLOAT}))
    .OUTPUT(query_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(key_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(value_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(bias_grad, TensorType({DT_FLOAT}))
    .OUTPUT(position_bias_grad, TensorType({DT_FLOAT}))
    .OUTPUT(time_bias_grad, TensorType({DT_FLOAT}))
    .OUTPUT(sink_grad, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(activation, String)
    .REQUIRED_ATTR(scale, Float)
    .REQUIRED_ATTR(post_scale, Float)
    .REQUIRED_ATTR(min_distance, Int)
    .REQUIRED_ATTR(max_distance, Int)
    .REQUIRED_ATTR(dropout, Float)
    .ATTR(score_cap, Float, 0.0)
    .REQUIRED_ATTR(wanted, Int)
    .OP_END_FACTORY_REG(JaggedAttentionBackward)

}  // namespace ge
