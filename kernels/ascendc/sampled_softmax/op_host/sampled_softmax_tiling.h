// Sizes for sampled_softmax: without CANN, so that tests exercise what the host computes.
#pragma once

#include "../op_kernel/sampled_softmax_tiling_data.h"
#include "sampled_softmax_tiling_common.h"

namespace turbogr {

struct SampledSoftmaxProblem {
  int64_t rows;
  int64_t negatives;
  int64_t groups;
  int64_t width;
  int64_t bytes;  // of a number of query
  int64_t hasIds;
  int64_t hasScales;
  int64_t cores;  // vector cores
  double scale;
};

// No blocks: the kernel does not take these sizes.
inline Launch Tile(const SampledSoftmaxProblem& p, SampledSoftmaxTiling* tiling) {
  Launch launch = {0, 0, sizeof(SampledSoftmaxTiling)};
  if (!TakesSampled(p.rows, p.negatives, p.groups, p.width)) return launch;
  tiling->sweep = Sweep(p.rows, p.negatives, p.width * p.bytes, p.cores);
  tiling->shape = Shape(p);
  tiling->shape.coreBytes = AlignGlobal(2 * tiling->sweep.slot * sizeof(float));
  tiling->logits = CubeTiling(kMostBlock, tiling->sweep.tile, p.width, p.bytes);
  launch.blocks = CubeCores(p.rows, p.cores);
  launch.workspace = 2 * launch.blocks * tiling->shape.coreBytes;
  return launch;
}

}  // namespace turbogr
