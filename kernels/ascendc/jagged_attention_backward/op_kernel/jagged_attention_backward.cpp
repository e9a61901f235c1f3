// JaggedAttentionBackward: gradients of attention over packed sequences. See README.md.
#include "jagged_attention_backward_kernel.h"

using namespace AscendC;
using turbogr::JaggedAttentionBackwardTiling;

extern "C" __global__ __aicore__ void jagged_attention_backward(
    GM_ADDR grad, GM_ADDR result, GM_ADDR log_sum, GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR query_offsets,
    GM_ADDR key_offsets, GM_ADDR query_columns, GM_ADDR key_columns, GM_ADDR key_valid, GM_ADDR pair_mask, GM_ADDR bias,
    GM_ADDR position_bias, GM_ADDR time_bias, GM_ADDR time_bounds, GM_ADDR query_times, GM_ADDR key_times,
    GM_ADDR dropout_seed, GM_ADDR sink, GM_ADDR query_grad, GM_ADDR key_grad, GM_ADDR value_grad, GM_ADDR bias_grad,
    GM_ADDR position_bias_grad, GM_ADDR time_bias_grad, GM_ADDR sink_grad, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(JaggedAttentionBackwardTiling);
  GET_TILING_DATA_WITH_STRUCT(JaggedAttentionBackwardTiling, t, tiling);
  AscendC::TPipe pipe;
  turbogr::JaggedAttentionBackwardKernel<DTYPE_QUERY, DTYPE_QUERY_OFFSETS> kernel;
  REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), kernel.pairs, &t.pairs, kernel.columns, &t.columns, kernel.rows,
                    &t.rows);
  kernel.Init(&pipe, t,
              {grad, result, log_sum, query, key, value, query_offsets, key_offsets, query_columns, key_columns,
               key_valid, pair_mask, bias, position_bias, time_bias, time_bounds, query_times, key_times,
               dropout_seed, query_grad, key_grad, value_grad, bias_grad, position_bias_grad, time_bias_grad},
              AscendC::GetUserWorkspace(workspace));
  kernel.Run();
}
