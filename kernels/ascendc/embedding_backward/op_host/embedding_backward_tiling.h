#pragma once

#include "../op_kernel/embedding_backward_tiling_data.h"
#include "rows_tiling.h"

namespace turbogr {

struct EmbeddingBackwardProblem {
  int64_t entries;     // rows of grad
  int64_t count;       // rows of y
  int64_t width;       // elements of a row
  int64_t paddingIdx;  // row of y that stays zero, or -1
  int64_t bytes;       // of an element
  int64_t indexBytes;  // of an id
  int64_t cores;
};

inline Launch Tile(const EmbeddingBackwardProblem& problem, EmbeddingBackwardTiling* tiling) {
  const int64_t blocks = TileRowScatter(problem.entries, problem.count, problem.width, problem.paddingIdx,
                                        problem.bytes, problem.indexBytes, problem.cores, &tiling->scatter);
  return {blocks, 0, sizeof(EmbeddingBackwardTiling)};
}

}  // namespace turbogr
