// Entry of sampled_softmax: loss of each row's positive against the negatives of its group.
#include "sampled_softmax_kernel.h"

using namespace AscendC;  // CANN has GetSysWorkSpacePtr outside of it, the twin inside
using turbogr::SampledSoftmaxTiling;

extern "C" __global__ __aicore__ void sampled_softmax(GM_ADDR query, GM_ADDR positive, GM_ADDR negative,
                                                      GM_ADDR query_offsets, GM_ADDR negative_offsets,
                                                      GM_ADDR positive_ids, GM_ADDR negative_ids,
                                                      GM_ADDR negative_scales, GM_ADDR loss, GM_ADDR log_sum,
                                                      GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(SampledSoftmaxTiling);
  GET_TILING_DATA_WITH_STRUCT(SampledSoftmaxTiling, t, tiling);
  TPipe pipe;
  turbogr::SampledSoftmaxKernel<DTYPE_QUERY, DTYPE_QUERY_OFFSETS> kernel(&pipe, t);
  REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), kernel.logits, &t.logits);
  kernel.Init(query, positive, negative, query_offsets, negative_offsets, positive_ids, negative_ids, negative_scales,
              loss, log_sum, GetUserWorkspace(workspace));
  kernel.Run();
}
