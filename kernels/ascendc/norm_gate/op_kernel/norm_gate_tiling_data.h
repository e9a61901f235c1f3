// What the host tells the kernel.
#pragma once

#include <cstdint>

namespace turbogr {

struct NormGateTiling {
  int64_t rows;
  int32_t width;
  int32_t tileRows;      // rows in the unified buffer at a time
  int32_t blockColumns;  // columns of them that are worked on at a time
  int32_t hasWeight;
  int32_t hasBias;
  int32_t bufferBytes;  // of a queue for x, gate or result
  float inverseWidth;
  float eps;
};

}  // namespace turbogr
