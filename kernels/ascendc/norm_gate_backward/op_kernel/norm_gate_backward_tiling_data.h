// What the host tells the kernel.
#pragma once

#include <cstdint>

namespace turbogr {

enum NormGateGradient : int32_t { kGradX = 1, kGradGate = 2, kGradWeight = 4, kGradBias = 8 };

struct NormGateBackwardTiling {
  int64_t rows;
  int64_t chunks;         // groups of rows, the same on any number of cores: column sums add up by chunk
  int64_t chunkRows;      // rows of each but the last
  int32_t width;
  int32_t tileRows;       // rows in the unified buffer at a time
  int32_t blockColumns;   // columns of them that are worked on at a time
  int32_t hasWeight;
  int32_t hasBias;
  int32_t wanted;         // bits of NormGateGradient
  int32_t bufferBytes;    // of a queue for grad, x, gate or a gradient of those
  float inverseWidth;
};

}  // namespace turbogr
