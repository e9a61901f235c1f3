// EmbeddingRows: rows of a table by id. y[...] = weight[ids[...]].
#include "embedding_kernel.h"

using turbogr::EmbeddingTiling;

extern "C" __global__ __aicore__ void embedding_rows(GM_ADDR weight, GM_ADDR ids, GM_ADDR y, GM_ADDR workspace,
                                                     GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(EmbeddingTiling);
  GET_TILING_DATA_WITH_STRUCT(EmbeddingTiling, sizes, tiling);
  AscendC::TPipe pipe;
  turbogr::EmbeddingKernel<DTYPE_WEIGHT, DTYPE_IDS> kernel(&pipe, sizes.gather);
  kernel.Run(weight, ids, y);
}
