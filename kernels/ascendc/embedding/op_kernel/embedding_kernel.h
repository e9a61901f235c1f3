#pragma once

#include "embedding_tiling_data.h"
#include "rows_gather.h"

namespace turbogr {

template <typename T, typename Index>
using EmbeddingKernel = RowGather<T, Index>;

}  // namespace turbogr
