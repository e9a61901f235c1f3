#pragma once

#include "rows_tiling_data.h"

namespace turbogr {

struct EmbeddingTiling {
  RowGatherTiling gather;
};

}  // namespace turbogr
