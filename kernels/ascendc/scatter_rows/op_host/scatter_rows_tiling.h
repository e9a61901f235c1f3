#pragma once

#include "../op_kernel/scatter_rows_tiling_data.h"
#include "rows_tiling.h"

namespace turbogr {

struct ScatterRowsProblem {
  int64_t entries;     // rows of x
  int64_t count;       // rows of y
  int64_t width;       // elements of a row
  int64_t bytes;       // of an element
  int64_t indexBytes;  // of a row's number
  int64_t cores;
};

inline Launch Tile(const ScatterRowsProblem& problem, ScatterRowsTiling* tiling) {
  const int64_t blocks = TileRowScatter(problem.entries, problem.count, problem.width, -1,
                                        problem.bytes, problem.indexBytes, problem.cores, &tiling->scatter);
  return {blocks, 0, sizeof(ScatterRowsTiling)};
}

}  // namespace turbogr
