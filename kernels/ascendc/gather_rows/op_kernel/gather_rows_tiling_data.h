#pragma once

#include "rows_tiling_data.h"

namespace turbogr {

struct GatherRowsTiling {
  RowGatherTiling gather;
};

}  // namespace turbogr
