// What the host tells the kernel.
#pragma once

#include <cstdint>  // CANN's header below takes it for granted

#include "kernel_tiling/kernel_tiling.h"
#include "sampled_softmax_sizes.h"

namespace turbogr {

struct SampledSoftmaxBackwardTiling {
  SampledShape shape;
  SampledSweep rowSweep;       // blocks of rows meet negatives
  SampledSweep negativeSweep;  // blocks of negatives meet rows
  int32_t wantsQuery, wantsPositive, wantsNegative;
  int32_t slot;        // logits of a block and a tile, of either sweep
  int32_t sums;        // elements of a block's gradient, of either sweep
  int32_t padding;
  TCubeTiling logits;   // of a block with a tile
  TCubeTiling product;  // of shares with a tile
};

}  // namespace turbogr
