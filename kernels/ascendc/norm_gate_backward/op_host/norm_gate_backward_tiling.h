// Sizes for norm_gate_backward: without CANN, so that tests exercise what the host computes.
#pragma once

#include "../op_kernel/norm_gate_backward_tiling_data.h"
#include "launch.h"
#include "row_norm_tiling.h"

namespace turbogr {

struct NormGateBackwardProblem {
  int64_t rows;
  int64_t width;
  int64_t bytes;  // of a number of x
  int64_t hasWeight;
  int64_t hasBias;
  int64_t wanted;  // bits of NormGateGradient
  int64_t cores;
};

namespace row_norm_host {

constexpr int64_t kMostChunks = 240;  // the same for each of 20, 24, 40 or 48 cores
constexpr int64_t kLeastChunk = 2048;  // numbers

inline int64_t ColumnSums(int64_t wanted) { return (wanted & kGradWeight ? 1 : 0) + (wanted & kGradBias ? 1 : 0); }

// Bytes of the unified buffer that the kernel takes; it makes its buffers in this order.
inline int64_t NormGateBackwardBytes(const NormGateBackwardProblem& p, int64_t wanted, int64_t rows, int64_t columns) {
  const int64_t slots = RoundUp(rows, 8);
  const int64_t buffer = Most(rows * columns * p.bytes, kLeastBuffer);
  const int64_t outputs = (wanted & kGradX ? 1 : 0) + (wanted & kGradGate ? 1 : 0);
  return (3 + outputs) * 2 * buffer                      // grad, x, gate; gradients of x and gate
         + 2 * slots * 4                                 // means and 1/deviations
         + ColumnSums(wanted) * RoundUp(p.width, 16) * 4
         + 2 * rows * RoundUp(p.width, 16) * 4 + 256     // normal rows and their gradients
         + (p.bytes < 4 ? 2 * rows * columns * 4 : 0)    // grad and gate as floats
         + 3 * slots * 32 + 3 * slots * 4                // numbers of each row
         + 2 * RoundUp(columns, 16) * 4;                 // weight and bias
}

}  // namespace row_norm_host

// No blocks: the rows are too wide.
inline Launch Tile(const NormGateBackwardProblem& p, NormGateBackwardTiling* tiling) {
  using namespace row_norm_host;
  Launch launch = {0, 0, sizeof(NormGateBackwardTiling)};
  if (p.width < 1 || p.width > kMostWidth) return launch;
  int64_t wanted = p.wanted;
  if (!p.hasWeight) wanted &= ~int64_t{kGradWeight};
  if (!p.hasBias) wanted &= ~int64_t{kGradBias};
  int64_t parts = 1, columns, rows = 0;
  while (rows == 0) {
    columns = BlockColumns(p.width, parts++, p.bytes);
    if (columns > kMostPitch) continue;
    while (rows < kMostRows && NormGateBackwardBytes(p, wanted, rows + 1, columns) <= kUnifiedBytes) ++rows;
  }
  // Nothing here may depend on the number of cores: it decides in which order columns add up.
  const int64_t chunkRows = Most(Parts(kLeastChunk, p.width), Parts(p.rows, kMostChunks));
  const int64_t chunks = Parts(p.rows, chunkRows);
  rows = Evenly(chunkRows, rows);
  tiling->rows = p.rows;
  tiling->chunks = chunks;
  tiling->chunkRows = chunkRows;
  tiling->width = p.width;
  tiling->tileRows = rows;
  tiling->blockColumns = columns;
  tiling->hasWeight = p.hasWeight;
  tiling->hasBias = p.hasBias;
  tiling->wanted = wanted;
  tiling->bufferBytes = Most(rows * columns * p.bytes, kLeastBuffer);
  tiling->inverseWidth = 1.0 / p.width;
  launch.blocks = Most(1, Least(chunks, p.cores));
  launch.workspace = chunks * ColumnSums(wanted) * RoundUp(p.width, 16) * 4;
  return launch;
}

}  // namespace turbogr
