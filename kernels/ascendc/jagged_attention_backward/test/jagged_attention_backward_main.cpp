// Launches the kernel on the CPU: in turbogr's twin, or with CANN's CPU debug library.
#include "../op_host/jagged_attention_backward_tiling.h"
#include "tikicpulib.h"

extern "C" __global__ __aicore__ void jagged_attention_backward(
    GM_ADDR grad, GM_ADDR result, GM_ADDR log_sum, GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR query_offsets,
    GM_ADDR key_offsets, GM_ADDR query_columns, GM_ADDR key_columns, GM_ADDR key_valid, GM_ADDR pair_mask, GM_ADDR bias,
    GM_ADDR position_bias, GM_ADDR time_bias, GM_ADDR time_bounds, GM_ADDR query_times, GM_ADDR key_times,
    GM_ADDR dropout_seed, GM_ADDR sink, GM_ADDR query_grad, GM_ADDR key_grad, GM_ADDR value_grad, GM_ADDR bias_grad,
    GM_ADDR position_bias_grad, GM_ADDR time_bias_grad, GM_ADDR sink_grad, GM_ADDR workspace, GM_ADDR tiling);

extern "C" void tile_jagged_attention_backward(const turbogr::JaggedAttentionBackwardProblem* problem,
                                               turbogr::JaggedAttentionBackwardTiling* tiling,
                                               turbogr::Launch* launch) {
  *launch = turbogr::Tile(*problem, tiling);
}

extern "C" void run_jagged_attention_backward(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(KernelMode::MIX_MODE);
  ICPU_RUN_KF(jagged_attention_backward, blocks, gm[0], gm[1], gm[2], gm[3], gm[4], gm[5], gm[6], gm[7], gm[8], gm[9],
              gm[10], gm[11], gm[12], gm[13], gm[14], gm[15], gm[16], gm[17], gm[18], gm[19], gm[20], gm[21], gm[22],
              gm[23], gm[24], gm[25], gm[26], workspace, tiling);
}
