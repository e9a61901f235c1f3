// EmbeddingBackward: gradient of a table. y[ids[i]] += grad[i] unless ids[i] == padding_idx, from zero.
#include "embedding_backward_kernel.h"

using turbogr::EmbeddingBackwardTiling;

extern "C" __global__ __aicore__ void embedding_backward(GM_ADDR grad, GM_ADDR ids, GM_ADDR y, GM_ADDR workspace,
                                                         GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(EmbeddingBackwardTiling);
  GET_TILING_DATA_WITH_STRUCT(EmbeddingBackwardTiling, sizes, tiling);
  AscendC::TPipe pipe;
  turbogr::EmbeddingBackwardKernel<DTYPE_GRAD, DTYPE_IDS> kernel(&pipe, sizes.scatter);
  kernel.Run(grad, ids, y);
}
