// Launches the kernel on the CPU: in turbogr's twin, or with CANN's CPU debug library.
#include "../op_host/norm_gate_backward_tiling.h"
#include "tikicpulib.h"

extern "C" __global__ __aicore__ void norm_gate_backward(GM_ADDR grad, GM_ADDR x, GM_ADDR gate, GM_ADDR weight,
                                                         GM_ADDR bias, GM_ADDR mean, GM_ADDR rstd, GM_ADDR grad_x,
                                                         GM_ADDR grad_gate, GM_ADDR grad_weight, GM_ADDR grad_bias,
                                                         GM_ADDR workspace, GM_ADDR tiling);

extern "C" void tile_norm_gate_backward(const turbogr::NormGateBackwardProblem* problem,
                                        turbogr::NormGateBackwardTiling* tiling, turbogr::Launch* launch) {
  *launch = turbogr::Tile(*problem, tiling);
}

extern "C" void run_norm_gate_backward(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(KernelMode::MIX_MODE);
  ICPU_RUN_KF(norm_gate_backward, blocks, gm[0], gm[1], gm[2], gm[3], gm[4], gm[5], gm[6], gm[7], gm[8], gm[9], gm[10],
              workspace, tiling);
}
