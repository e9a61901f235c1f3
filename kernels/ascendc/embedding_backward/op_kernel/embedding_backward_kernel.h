#pragma once

#include "embedding_backward_tiling_data.h"
#include "rows_scatter.h"

namespace turbogr {

template <typename T, typename Index>
using EmbeddingBackwardKernel = RowScatter<T, Index>;

}  // namespace turbogr
