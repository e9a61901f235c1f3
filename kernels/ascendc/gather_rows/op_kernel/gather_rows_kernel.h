#pragma once

#include "gather_rows_tiling_data.h"
#include "rows_gather.h"

namespace turbogr {

template <typename T, typename Index>
using GatherRowsKernel = RowGather<T, Index>;

}  // namespace turbogr
