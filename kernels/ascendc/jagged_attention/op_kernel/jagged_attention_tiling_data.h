#pragma once

#include "attention_shape.h"
#include "kernel_tiling/kernel_tiling.h"

namespace turbogr {

struct JaggedAttentionTiling {
  AttentionShape shape;
  int64_t coreBytes;  // workspace of one vector core
  TCubeTiling scores, values;
};

}  // namespace turbogr
