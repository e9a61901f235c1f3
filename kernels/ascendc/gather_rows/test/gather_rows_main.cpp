// Launches the kernel on the CPU: in turbogr's twin, or with CANN's CPU debug library.
#include "../op_host/gather_rows_tiling.h"
#include "tikicpulib.h"

extern "C" __global__ __aicore__ void gather_rows(GM_ADDR x, GM_ADDR rows, GM_ADDR y, GM_ADDR workspace,
                                                  GM_ADDR tiling);

extern "C" void tile_gather_rows(const turbogr::GatherRowsProblem* problem, turbogr::GatherRowsTiling* tiling,
                                 turbogr::Launch* launch) {
  *launch = turbogr::Tile(*problem, tiling);
}

extern "C" void run_gather_rows(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(KernelMode::AIV_MODE);
  ICPU_RUN_KF(gather_rows, blocks, gm[0], gm[1], gm[2], workspace, tiling);
}
