#pragma once

#include "rows_tiling_data.h"

namespace turbogr {

struct ScatterRowsTiling {
  RowScatterTiling scatter;
};

}  // namespace turbogr
