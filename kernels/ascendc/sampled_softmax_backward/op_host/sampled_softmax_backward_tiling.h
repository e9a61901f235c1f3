// Sizes for sampled_softmax_backward: without CANN, so that tests exercise what the host computes.
#pragma once

#include "../op_kernel/sampled_softmax_backward_tiling_data.h"
#include "sampled_softmax_tiling_common.h"

namespace turbogr {

struct SampledSoftmaxBackwardProblem {
  int64_t rows;
  int64_t negatives;
  int64_t groups;
  int64_t width;
  int64_t bytes;  // of a number of query
  int64_t hasIds;
  int64_t hasScales;
  int64_t wanted;  // a bit each for the gradients of query (1), positive (2) and negative (4)
  int64_t cores;  // vector cores
  double scale;
};

// No blocks: the kernel does not take these sizes.
inline Launch Tile(const SampledSoftmaxBackwardProblem& p, SampledSoftmaxBackwardTiling* tiling) {
  Launch launch = {0, 0, sizeof(SampledSoftmaxBackwardTiling)};
  if (!TakesSampled(p.rows, p.negatives, p.groups, p.width)) return launch;
  const int64_t loaded = 2 * p.width * p.bytes;  // for logits, and for the product with shares
  const SampledSweep rows = Sweep(p.rows, p.negatives, loaded, p.cores);
  const SampledSweep negatives = Sweep(p.negatives, p.rows, loaded, p.cores);
  const int32_t block = rows.block > negatives.block ? rows.block : negatives.block;
  const int32_t tile = rows.tile > negatives.tile ? rows.tile : negatives.tile;
  tiling->rowSweep = rows;
  tiling->negativeSweep = negatives;
  tiling->wantsQuery = p.wanted & 1;
  tiling->wantsPositive = p.wanted >> 1 & 1;
  tiling->wantsNegative = p.wanted >> 2 & 1;
  tiling->slot = rows.slot > negatives.slot ? rows.slot : negatives.slot;
  tiling->sums = block * p.width;
  tiling->shape = Shape(p);
  tiling->shape.coreBytes = AlignGlobal(2 * (tiling->slot * (sizeof(float) + p.bytes) + tiling->sums * sizeof(float)));
  tiling->logits = CubeTiling(kMostBlock, tile, p.width, p.bytes);
  tiling->product = CubeTiling(kMostBlock, p.width, tile, p.bytes);
  launch.blocks = CubeCores(p.rows > p.negatives ? p.rows : p.negatives, p.cores);
  launch.workspace = 2 * launch.blocks * tiling->shape.coreBytes;
  return launch;
}

}  // namespace turbogr
