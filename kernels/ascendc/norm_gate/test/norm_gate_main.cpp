// Launches the kernel on the CPU: in turbogr's twin, or with CANN's CPU debug library.
#include "../op_host/norm_gate_tiling.h"
#include "tikicpulib.h"

extern "C" __global__ __aicore__ void norm_gate(GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR bias, GM_ADDR result,
                                                GM_ADDR mean, GM_ADDR rstd, GM_ADDR workspace, GM_ADDR tiling);

extern "C" void tile_norm_gate(const turbogr::NormGateProblem* problem, turbogr::NormGateTiling* tiling,
                               turbogr::Launch* launch) {
  *launch = turbogr::Tile(*problem, tiling);
}

extern "C" void run_norm_gate(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(KernelMode::AIV_MODE);
  ICPU_RUN_KF(norm_gate, blocks, gm[0], gm[1], gm[2], gm[3], gm[4], gm[5], gm[6], workspace, tiling);
}
