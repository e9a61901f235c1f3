// Sizes for norm_gate: without CANN, so that tests exercise what the host computes.
#pragma once

#include "../op_kernel/norm_gate_tiling_data.h"
#include "launch.h"
#include "row_norm_tiling.h"

namespace turbogr {

struct NormGateProblem {
  int64_t rows;
  int64_t width;
  int64_t bytes;  // of a number of x
  int64_t hasWeight;
  int64_t hasBias;
  int64_t cores;
  double eps;
};

namespace row_norm_host {

// Bytes of the unified buffer that the kernel takes; it makes its buffers in this order.
inline int64_t NormGateBytes(const NormGateProblem& p, int64_t rows, int64_t columns) {
  const int64_t slots = RoundUp(rows, 8);
  return 3 * 2 * Most(rows * columns * p.bytes, kLeastBuffer)  // x, gate, result
         + 2 * 2 * slots * 4                                   // means and 1/deviations
         + rows * RoundUp(p.width, 16) * 4                     // the tile
         + rows * columns * 4                                  // scratch
         + slots * 32 + 3 * slots * 4                          // numbers of each row
         + (p.hasWeight + p.hasBias) * RoundUp(p.width, 16) * 4;
}

}  // namespace row_norm_host

// No blocks: the rows are too wide.
inline Launch Tile(const NormGateProblem& p, NormGateTiling* tiling) {
  using namespace row_norm_host;
  const int64_t blocks = Most(1, Least(p.rows, p.cores));
  Launch launch = {0, 0, sizeof(NormGateTiling)};
  if (p.width < 1 || p.width > kMostWidth) return launch;
  int64_t parts = 1, columns, rows = 0;
  while (rows == 0) {
    columns = BlockColumns(p.width, parts++, p.bytes);
    if (columns > kMostPitch) continue;
    while (rows < kMostRows && NormGateBytes(p, rows + 1, columns) <= kUnifiedBytes) ++rows;
  }
  rows = Evenly(Parts(p.rows, blocks), rows);
  tiling->rows = p.rows;
  tiling->width = p.width;
  tiling->tileRows = rows;
  tiling->blockColumns = columns;
  tiling->hasWeight = p.hasWeight;
  tiling->hasBias = p.hasBias;
  tiling->bufferBytes = Most(rows * columns * p.bytes, kLeastBuffer);
  tiling->inverseWidth = 1.0 / p.width;
  tiling->eps = p.eps;
  launch.blocks = blocks;
  return launch;
}

}  // namespace turbogr
