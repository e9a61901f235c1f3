#pragma once

#include "../op_kernel/jagged_attention_tiling_data.h"
#include "attention_tiling.h"

namespace turbogr {

using JaggedAttentionProblem = AttentionProblem;

// What JaggedAttentionKernel::InitBuffers takes.
inline int64_t ForwardBytes(const AttentionShape& shape, const AttentionProblem& p) {
  int64_t bytes = shape.slab * (2 * 4 + 2 * p.bytes + 4) + TileBytes(shape, p.indexBytes);
  if (!shape.softmax) return bytes;
  bytes += int64_t{shape.rowBlock} * AlignUp(shape.valueDepth, 16) * 4 + 9 * kRowBlock * 4 + kRowBlock * 32;
  return bytes;
}

// No blocks where the problem does not fit.
inline Launch Tile(const JaggedAttentionProblem& p, JaggedAttentionTiling* tiling) {
  auto& shape = tiling->shape;
  shape = ShapeOf(p);
  const int32_t width = AlignUp(shape.valueDepth, 16);
  bool fits = false;
  for (int32_t rows = RowBlockFor(p); Possible(p) && rows >= 16 && !fits; rows = rows / 2 / 16 * 16) {
    for (int32_t slab = 8192; slab >= 2048 && !fits; slab /= 2) {
      shape.rowBlock = rows;
      shape.slab = slab;
      // The scratch of a slab holds bounds twice while their table is made.
      fits = ForwardBytes(shape, p) <= kUbBytes && slab >= 8 * width && slab >= 2 * shape.boundSlots;
    }
  }
  if (!fits) return {0, 0, sizeof(JaggedAttentionTiling)};
  const int64_t tile = int64_t{shape.rowBlock} * kKeyBlock;
  tiling->coreBytes = (2 * tile * (4 + p.bytes) + 2 * int64_t{shape.rowBlock} * width * 4 + 511) / 512 * 512;
  tiling->scores = CubeTiling(shape.rowBlock, kKeyBlock, shape.depth, static_cast<int32_t>(p.bytes));
  tiling->values = CubeTiling(shape.rowBlock, shape.valueDepth, kKeyBlock, static_cast<int32_t>(p.bytes));
  return {(shape.cores + 1) / 2, tiling->coreBytes * shape.cores, sizeof(JaggedAttentionTiling)};
}

}  // namespace turbogr
