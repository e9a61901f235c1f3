// Launches the kernel on the CPU: in turbogr's twin, or with CANN's CPU debug library.
#include "../op_host/sampled_softmax_backward_tiling.h"
#include "tikicpulib.h"

extern "C" __global__ __aicore__ void sampled_softmax_backward(
    GM_ADDR grad, GM_ADDR log_sum, GM_ADDR query, GM_ADDR positive, GM_ADDR negative, GM_ADDR query_offsets,
    GM_ADDR negative_offsets, GM_ADDR positive_ids, GM_ADDR negative_ids, GM_ADDR negative_scales, GM_ADDR query_grad,
    GM_ADDR positive_grad, GM_ADDR negative_grad, GM_ADDR workspace, GM_ADDR tiling);

extern "C" void tile_sampled_softmax_backward(const turbogr::SampledSoftmaxBackwardProblem* problem,
                                              turbogr::SampledSoftmaxBackwardTiling* tiling, turbogr::Launch* launch) {
  *launch = turbogr::Tile(*problem, tiling);
}

extern "C" void run_sampled_softmax_backward(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(KernelMode::MIX_MODE);
  ICPU_RUN_KF(sampled_softmax_backward, blocks, gm[0], gm[1], gm[2], gm[3], gm[4], gm[5], gm[6], gm[7], gm[8], gm[9],
              gm[10], gm[11], gm[12], workspace, tiling);
}
