#pragma once

#include "../op_kernel/gather_rows_tiling_data.h"
#include "rows_tiling.h"

namespace turbogr {

struct GatherRowsProblem {
  int64_t count;       // rows of y
  int64_t width;       // elements of a row
  int64_t bytes;       // of an element
  int64_t cores;
};

inline Launch Tile(const GatherRowsProblem& problem, GatherRowsTiling* tiling) {
  const int64_t blocks = TileRowGather(problem.count, problem.width, problem.bytes, problem.cores, &tiling->gather);
  return {blocks, 0, sizeof(GatherRowsTiling)};
}

}  // namespace turbogr
