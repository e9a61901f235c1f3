// Entry of norm_gate: layer norm of rows, times a gate.
#include "norm_gate_kernel.h"

using turbogr::NormGateTiling;

extern "C" __global__ __aicore__ void norm_gate(GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR bias, GM_ADDR result,
                                                GM_ADDR mean, GM_ADDR rstd, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(NormGateTiling);
  GET_TILING_DATA_WITH_STRUCT(NormGateTiling, t, tiling);
  AscendC::TPipe pipe;
  turbogr::NormGateKernel<DTYPE_X, DTYPE_WEIGHT> kernel(&pipe, t);
  kernel.Init(x, gate, weight, bias, result, mean, rstd);
  kernel.Run();
}
