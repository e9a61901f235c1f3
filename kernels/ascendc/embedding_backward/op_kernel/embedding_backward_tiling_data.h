#pragma once

#include "rows_tiling_data.h"

namespace turbogr {

struct EmbeddingBackwardTiling {
  RowScatterTiling scatter;
};

}  // namespace turbogr
