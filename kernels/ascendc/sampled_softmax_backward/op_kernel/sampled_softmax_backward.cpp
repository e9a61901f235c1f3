// Entry of sampled_softmax_backward: gradients of query, positive and negative.
#include "sampled_softmax_backward_kernel.h"

using namespace AscendC;  // CANN has GetSysWorkSpacePtr outside of it, the twin inside
using turbogr::SampledSoftmaxBackwardTiling;

extern "C" __global__ __aicore__ void sampled_softmax_backward(
    GM_ADDR grad, GM_ADDR log_sum, GM_ADDR query, GM_ADDR positive, GM_ADDR negative, GM_ADDR query_offsets,
    GM_ADDR negative_offsets, GM_ADDR positive_ids, GM_ADDR negative_ids, GM_ADDR negative_scales, GM_ADDR query_grad,
    GM_ADDR positive_grad, GM_ADDR negative_grad, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(SampledSoftmaxBackwardTiling);
  GET_TILING_DATA_WITH_STRUCT(SampledSoftmaxBackwardTiling, t, tiling);
  TPipe pipe;
  turbogr::SampledSoftmaxBackwardKernel<DTYPE_QUERY, DTYPE_QUERY_OFFSETS> kernel(&pipe, t);
  REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), kernel.logits, &t.logits, kernel.product, &t.product);
  kernel.InitInputs(grad, log_sum, query, positive, negative, query_offsets, negative_offsets, positive_ids,
                    negative_ids, negative_scales);
  kernel.InitResults(query_grad, positive_grad, negative_grad, GetUserWorkspace(workspace));
  kernel.Run();
}
