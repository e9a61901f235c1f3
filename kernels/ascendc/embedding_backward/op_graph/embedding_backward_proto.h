#pragma once

#include "graph/operator_reg.h"

namespace ge {

// `count` rows of zeros, with grad[i] added at ids[i] unless that is padding_idx.
REG_OP(EmbeddingBackward)
    .INPUT(grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(ids, TensorType({DT_INT32, DT_INT64}))
    .OUTPUT(y, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .REQUIRED_ATTR(count, Int)
    .ATTR(padding_idx, Int, -1)
    .OP_END_FACTORY_REG(EmbeddingBackward)

}  // namespace ge
