// A tile of scores, queries x keys, of the stream that a core works off, and parts of it for the vector unit.
#pragma once

#include "attention_shape.h"
#include "kernel_operator.h"

namespace turbogr {

// Queries and keys of one tile, and where it stands in its unit of work.
struct Step {
  int64_t queryRow, keyRow;  // first rows, of the packed tensors
  int32_t rows, keys;        // their numbers; none of either: nothing to see
  int32_t head;
  int32_t slot;              // of the rings in the workspace
  int32_t unit;              // number of the unit of work, modulo 2
  int32_t sequence;          // number of it
  bool exists, first, last;  // of its unit
  bool closing;              // the last one of its head, in the backward
  bool lower, upper;         // whether min_distance, max_distance hide a pair
  int32_t column;            // of the first key

  __aicore__ inline bool Busy() const { return exists && rows > 0 && keys > 0; }
};

// Rows of a tile, and the columns that they see: [low, low + columns), in a buffer of `width` columns.
struct Slab {
  int32_t row, rows, low, columns, width;

  __aicore__ inline int32_t Count() const { return rows * width; }
};

}  // namespace turbogr
