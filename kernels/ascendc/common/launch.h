// What a tiling function says about a launch, beside the tiling struct it fills.
#pragma once

#include <cstdint>

namespace turbogr {

struct Launch {
  int64_t blocks;       // vector cores, or pairs of a cube and two vector cores where there are matrix products
  int64_t workspace;    // bytes behind the system's part
  int64_t tilingBytes;  // size of the tiling struct
};

}  // namespace turbogr
