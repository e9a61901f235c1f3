// JaggedAttention: attention over packed sequences. See README.md.
#include "jagged_attention_kernel.h"

using namespace AscendC;
using turbogr::JaggedAttentionTiling;

extern "C" __global__ __aicore__ void jagged_attention(
    GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR query_offsets, GM_ADDR key_offsets, GM_ADDR query_columns,
    GM_ADDR key_columns, GM_ADDR key_valid, GM_ADDR pair_mask, GM_ADDR bias, GM_ADDR position_bias, GM_ADDR time_bias,
    GM_ADDR time_bounds, GM_ADDR query_times, GM_ADDR key_times, GM_ADDR dropout_seed, GM_ADDR sink, GM_ADDR result,
    GM_ADDR log_sum, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(JaggedAttentionTiling);
  GET_TILING_DATA_WITH_STRUCT(JaggedAttentionTiling, t, tiling);
  AscendC::TPipe pipe;
  turbogr::JaggedAttentionKernel<DTYPE_QUERY, DTYPE_QUERY_OFFSETS> kernel;
  REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), kernel.scores, &t.scores, kernel.values, &t.values);
  kernel.Init(&pipe, t, {query, key, value, query_offsets, key_offsets, query_columns, key_columns, key_valid,
                         pair_mask, bias, position_bias, time_bias, time_bounds, query_times, key_times, dropout_seed,
                         result, log_sum},
              AscendC::GetUserWorkspace(workspace));
  kernel.Run();
}
