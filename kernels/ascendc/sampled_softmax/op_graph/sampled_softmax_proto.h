#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Loss of each row's positive against the negatives of its group, and the logarithm of the sum of their exponentials.
REG_OP(SampledSoftmax)
    .INPUT(query, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(positive, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(negative, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(query_offsets, TensorType({DT_INT32, DT_INT64}))
    .INPUT(negative_offsets, TensorType({DT_INT32, DT_INT64}))
    .OPTIONAL_INPUT(positive_ids, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(negative_ids, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(negative_scales, TensorType({DT_FLOAT}))
    .OUTPUT(loss, TensorType({DT_FLOAT}))
    .OUTPUT(log_sum, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(scale, Float)
    .OP_END_FACTORY_REG(SampledSoftmax)

}  // namespace ge
