// ScatterRows: rows added up by number. y[rows[i]] += x[i], from zero.
#include "scatter_rows_kernel.h"

using turbogr::ScatterRowsTiling;

extern "C" __global__ __aicore__ void scatter_rows(GM_ADDR x, GM_ADDR rows, GM_ADDR y, GM_ADDR workspace,
                                                   GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(ScatterRowsTiling);
  GET_TILING_DATA_WITH_STRUCT(ScatterRowsTiling, sizes, tiling);
  AscendC::TPipe pipe;
  turbogr::ScatterRowsKernel<DTYPE_X, DTYPE_ROWS> kernel(&pipe, sizes.scatter);
  kernel.Run(x, rows, y);
}
