// Entry of norm_gate_backward: gradients of x, gate, weight and bias.
#include "norm_gate_backward_kernel.h"

using turbogr::NormGateBackwardTiling;

extern "C" __global__ __aicore__ void norm_gate_backward(GM_ADDR grad, GM_ADDR x, GM_ADDR gate, GM_ADDR weight,
                                                         GM_ADDR bias, GM_ADDR mean, GM_ADDR rstd, GM_ADDR grad_x,
                                                         GM_ADDR grad_gate, GM_ADDR grad_weight, GM_ADDR grad_bias,
                                                         GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);  // for SyncAll
  REGISTER_TILING_DEFAULT(NormGateBackwardTiling);
  GET_TILING_DATA_WITH_STRUCT(NormGateBackwardTiling, t, tiling);
  AscendC::TPipe pipe;
  turbogr::NormGateBackwardKernel<DTYPE_X, DTYPE_WEIGHT> kernel(&pipe, t);
  kernel.Init(grad, x, gate, weight, bias, mean, rstd);
  kernel.InitOutputs(grad_x, grad_gate, grad_weight, grad_bias, AscendC::GetUserWorkspace(workspace));
  kernel.Run();
}
