#pragma once

#include "attention_shape.h"
#include "kernel_tiling/kernel_tiling.h"

namespace turbogr {

// Bits of `wanted`: gradients in the order of the op's results.
constexpr int32_t kWantQuery = 1, kWantKey = 2, kWantValue = 4, kWantBias = 8, kWantPosition = 16, kWantTime = 32;

struct JaggedAttentionBackwardTiling {
  AttentionShape shape;
  int32_t wanted;
  int32_t deterministic;
  int32_t lanes;          // of partial sums of tables: one for each core, or for each sequence
  int32_t positionPitch;  // entries of a partial sum, rounded up
  int32_t timePitch;
  int64_t biasSequence, biasHead;  // strides of the gradient of bias, which may have more sequences and heads than it
  int64_t biasEntries;             // its size
  // Bytes of the workspace before gradients of queries, statistics of rows, partial sums, and what each core has.
  int64_t queriesAt, rowsAt, positionsAt, timesAt, coresAt, coreBytes;
  TCubeTiling pairs, columns, rows;
};

}  // namespace turbogr
