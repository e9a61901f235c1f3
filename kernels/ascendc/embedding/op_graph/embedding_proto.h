#pragma once

#include "graph/operator_reg.h"

namespace ge {

// y[...] = weight[ids[...]]. padding_idx matters to the gradient only.
REG_OP(EmbeddingRows)
    .INPUT(weight, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(ids, TensorType({DT_INT32, DT_INT64}))
    .OUTPUT(y, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .ATTR(padding_idx, Int, -1)
    .OP_END_FACTORY_REG(EmbeddingRows)

}  // namespace ge
