#pragma once

#include "graph/operator_reg.h"

namespace ge {

// `count` rows of zeros, with x[i] added at rows[i].
REG_OP(ScatterRows)
    .INPUT(x, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(rows, TensorType({DT_INT32, DT_INT64}))
    .OUTPUT(y, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .REQUIRED_ATTR(count, Int)
    .OP_END_FACTORY_REG(ScatterRows)

}  // namespace ge
