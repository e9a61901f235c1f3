#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Gradients of SampledSoftmax; `wanted` has a bit each for query (1), positive (2) and negative (4).
REG_OP(SampledSoftmaxBackward)
    .INPUT(grad, TensorType({DT_FLOAT}))
    .INPUT(log_sum, TensorType({DT_FLOAT}))
    .INPUT(query, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(positive, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(negative, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(query_offsets, TensorType({DT_INT32, DT_INT64}))
    .INPUT(negative_offsets, TensorType({DT_INT32, DT_INT64}))
    .OPTIONAL_INPUT(positive_ids, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(negative_ids, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(negative_scales, TensorType({DT_FLOAT}))
    .OUTPUT(query_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(positive_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(negative_grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .REQUIRED_ATTR(scale, Float)
    .REQUIRED_ATTR(wanted, Int)
    .OP_END_FACTORY_REG(SampledSoftmaxBackward)

}  // namespace ge
