// What the host tells the kernel.
#pragma once

#include <cstdint>  // CANN's header below takes it for granted

#include "kernel_tiling/kernel_tiling.h"
#include "sampled_softmax_sizes.h"

namespace turbogr {

struct SampledSoftmaxTiling {
  SampledShape shape;
  SampledSweep sweep;
  TCubeTiling logits;  // of a block of rows with a tile of negatives
};

}  // namespace turbogr
