// Sizes for the row kernels: without CANN, so that tests exercise what the host computes.
#pragma once

#include "launch.h"
#include "rows_tiling_data.h"

namespace turbogr {

constexpr int64_t kRowUnifiedBytes = 176 * 1024;  // of 192 KB: the system keeps 8 KB, the rest is a margin

inline int64_t RowBlocks(int64_t rows, int64_t cores) { return rows < 1 ? 1 : rows < cores ? rows : cores; }

// Elements from the start of a row to that of the next, in the unified buffer.
inline int64_t RowPitch(int64_t columns, int64_t bytes) {
  const int64_t unit = kBlockBytes / bytes;
  return (columns + unit - 1) / unit * unit;
}

inline int64_t AtMost(int64_t value, int64_t most) { return value < most ? value : most; }
inline int64_t AtLeast(int64_t value, int64_t least) { return value > least ? value : least; }

// In the scatter kernel entries and rows of the result are 32-bit numbers, and a row is at most the gap of a copy.
inline bool RowScatterTakes(int64_t entries, int64_t count, int64_t width, int64_t bytes) {
  return entries <= INT32_MAX && count <= INT32_MAX && width <= UINT32_MAX / bytes;
}

// `bytes` is the size of an element. A core makes at least 8 copies, so that rows are read while others are written,
// but none below 8 KB for that.
inline int64_t TileRowGather(int64_t count, int64_t width, int64_t bytes, int64_t cores, RowGatherTiling* tiling) {
  const int64_t blocks = RowBlocks(count, cores);
  tiling->count = count;
  tiling->width = width;
  tiling->columnsPerCopy = AtMost(width, kGatherBytes / bytes);
  const int64_t rowBytes = width ? RowPitch(tiling->columnsPerCopy, bytes) * bytes : kBlockBytes;
  const int64_t eighth = (count + 8 * blocks - 1) / (8 * blocks);
  const int64_t fewest = AtLeast(8 * 1024 / rowBytes, 1);
  tiling->rowsPerCopy = AtMost(AtLeast(eighth, fewest), kGatherBytes / rowBytes);
  return blocks;
}

inline int64_t TileRowScatter(int64_t entries, int64_t count, int64_t width, int64_t skip, int64_t bytes,
                              int64_t indexBytes, int64_t cores, RowScatterTiling* tiling) {
  const int64_t blocks = RowBlocks(count, cores);
  tiling->entries = entries;
  tiling->count = count;
  tiling->width = width;
  tiling->skip = skip;
  tiling->tileColumns = AtMost(width, kScatterRowBytes / bytes);
  const int64_t pitch = width ? RowPitch(tiling->tileColumns, bytes) : kBlockBytes / bytes;
  tiling->rowsPerLoad = kScatterRowBytes / (pitch * bytes);
  int64_t taken = 2 * kScatterChunk * indexBytes;  // entries, double buffered
  taken += 4 * kScatterChunk * 4;                  // their places, and what is worked out about them
  taken += 3 * kScatterMaskBytes;
  taken += 2 * kScatterList * 4;  // the list: rows and places
  taken += 2 * kScatterRowBytes;  // rows of x, double buffered
  if (bytes < 4) {
    taken += kScatterRowBytes / bytes * 4;  // the same as floats
    taken += 2 * kScatterRowBytes;          // rows of the result, double buffered
  }
  // A tile of sums and its rounded rows, or two tiles, one of which is written while the other is summed.
  const int64_t fit = (kRowUnifiedBytes - taken) / (pitch * 4) / (bytes < 4 ? 1 : 2);
  const int64_t share = AtLeast((count + blocks - 1) / blocks, 1);
  tiling->tileRows = AtMost(AtMost(fit, kMostBlocks), share);
  return blocks;
}

}  // namespace turbogr
