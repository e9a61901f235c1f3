#pragma once

#include "../op_kernel/jagged_attention_backward_tiling_data.h"
#include "attention_tiling.h"

namespace turbogr {

using JaggedAttentionBackwardProblem = AttentionProblem;

// What JaggedAttentionBackwardKernel::InitBuffers takes.
inline int64_t BackwardBytes(const JaggedAttentionBackwardTiling& tiling, const AttentionProblem& p) {
  const auto& shape = tiling.shape;
  int64_t bytes = shape.slab * (4 * 4 + 4 * p.bytes + 2 * 4) + TileBytes(shape, p.indexBytes) + 32;
  if (shape.softmax) bytes += 4 * kRowBlock * 4 + 2 * kRowBlock * 4 + 2 * kRowBlock * 32;
  if (tiling.wanted & (kWantBias | kWantPosition)) bytes += shape.slab * 4 + 2 * kKeyBlock * 4;
  if (tiling.wanted & kWantTime) bytes += shape.slab * 4 + shape.slab / 8 + tiling.timePitch * (32 + 4) + 32;
  return bytes;
}

// No blocks where the problem does not fit.
inline Launch Tile(const JaggedAttentionBackwardProblem& p, JaggedAttentionBackwardTiling* tiling) {
  auto& shape = tiling->shape;
  shape = ShapeOf(p);
  tiling->wanted = static_cast<int32_t>(p.wanted);
  if (p.positionEntries == 0) tiling->wanted &= ~kWantPosition;
  if (p.bias.keys == 0) tiling->wanted &= ~kWantBias;
  if (p.timeHeads == 0) tiling->wanted &= ~kWantTime;
  tiling->deterministic = p.deterministic != 0;
  tiling->lanes = static_cast<int32_t>(p.deterministic ? p.sequences : shape.cores);
  // Sums over sequences or heads have no fixed order, so deterministic mode leaves them to the caller.
  const bool whole = p.gradSequences == p.sequences && p.gradHeads == p.heads;
  const bool ordered = !p.deterministic || (tiling->wanted & kWantBias) == 0 || whole;
  const int64_t own = p.bias.queries * p.bias.keys;
  tiling->biasHead = p.gradHeads > 1 ? own : 0;
  tiling->biasSequence = p.gradSequences > 1 ? p.gradHeads * own : 0;
  tiling->biasEntries = p.gradSequences * p.gradHeads * own;
  tiling->positionPitch = AlignUp(shape.positionEntries, 8);
  tiling->timePitch = AlignUp(shape.timeBounds + 1, 8);
  const int32_t depth = AlignUp(shape.depth, 16), width = AlignUp(shape.valueDepth, 16);
  const int32_t widest = depth > width ? depth : width;
  bool fits = false;
  shape.rowBlock = RowBlockFor(p);
  for (int32_t slab = 4096; Possible(p) && ordered && slab >= 2048 && !fits; slab /= 2) {
    shape.slab = slab;
    fits = BackwardBytes(*tiling, p) <= kUbBytes && slab >= 8 * widest && slab >= 2 * shape.boundSlots;
  }
  if (!fits) return {0, 0, sizeof(JaggedAttentionBackwardTiling)};
  const int64_t tile = int64_t{shape.rowBlock} * kKeyBlock;
  const int64_t sums = int64_t{kKeyBlock} * (depth + width);
  tiling->coreBytes = (2 * tile * (2 * 4 + 2 * p.bytes) + 2 * sums * 4 + 511) / 512 * 512;
  int64_t at = 0;
  const auto take = [&at](bool wanted, int64_t floats) {
    const int64_t begin = at;
    if (wanted) at += (floats * 4 + 511) / 512 * 512;
    return begin;
  };
  tiling->queriesAt = take(tiling->wanted & kWantQuery, p.queryRows * p.heads * p.depth);
  tiling->rowsAt = take(p.softmax, 2 * p.heads * p.queryRows);
  tiling->positionsAt = take(tiling->wanted & kWantPosition, tiling->lanes * p.heads * tiling->positionPitch);
  tiling->timesAt = take(tiling->wanted & kWantTime, tiling->lanes * p.heads * tiling->timePitch);
  tiling->coresAt = at;
  const int32_t bytes = static_cast<int32_t>(p.bytes);
  const int32_t deepest = shape.depth > shape.valueDepth ? shape.depth : shape.valueDepth;
  tiling->pairs = CubeTiling(shape.rowBlock, kKeyBlock, deepest, bytes);
  tiling->columns = TallCubeTiling(kKeyBlock, deepest, shape.rowBlock, bytes);
  tiling->rows = CubeTiling(shape.rowBlock, shape.depth, kKeyBlock, bytes);
  return {(shape.cores + 1) / 2, at + tiling->coreBytes * shape.cores, sizeof(JaggedAttentionBackwardTiling)};
}

}  // namespace turbogr
