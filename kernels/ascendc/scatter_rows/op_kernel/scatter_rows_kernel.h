#pragma once

#include "scatter_rows_tiling_data.h"
#include "rows_scatter.h"

namespace turbogr {

template <typename T, typename Index>
using ScatterRowsKernel = RowScatter<T, Index>;

}  // namespace turbogr
