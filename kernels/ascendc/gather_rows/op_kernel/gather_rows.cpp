// GatherRows: rows by number. y[i] = x[rows[i]].
#include "gather_rows_kernel.h"

using turbogr::GatherRowsTiling;

extern "C" __global__ __aicore__ void gather_rows(GM_ADDR x, GM_ADDR rows, GM_ADDR y, GM_ADDR workspace,
                                                  GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(GatherRowsTiling);
  GET_TILING_DATA_WITH_STRUCT(GatherRowsTiling, sizes, tiling);
  AscendC::TPipe pipe;
  turbogr::GatherRowsKernel<DTYPE_X, DTYPE_ROWS> kernel(&pipe, sizes.gather);
  kernel.Run(x, rows, y);
}
