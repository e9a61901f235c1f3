#pragma once

#include "graph/operator_reg.h"

namespace ge {

// y[i] = x[rows[i]].
REG_OP(GatherRows)
    .INPUT(x, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(rows, TensorType({DT_INT32, DT_INT64}))
    .OUTPUT(y, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OP_END_FACTORY_REG(GatherRows)

}  // namespace ge
