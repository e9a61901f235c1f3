// What the host tells the row kernels, and the sizes that both of them know.
#pragma once

#include <cstdint>

namespace turbogr {

constexpr int64_t kBlockBytes = 32;    // of the unified buffer: rows start on a multiple
constexpr int64_t kMostBlocks = 4095;  // of one copy

// --- gather: y[i] = x[rows[i]] -----------------------------------------------------------------------

struct RowGatherTiling {
  int64_t count;           // rows of the result
  int64_t width;           // elements of a row
  int64_t rowsPerCopy;     // rows of one buffer
  int64_t columnsPerCopy;  // of one buffer: `width`, or a piece of a row that fits no buffer
};

constexpr int64_t kGatherIndices = 2048;     // read at once
constexpr int64_t kGatherBuffers = 4;        // copies under way
constexpr int64_t kGatherBytes = 36 * 1024;  // of each

// --- scatter: y[rows[i]] += x[i] ---------------------------------------------------------------------

struct RowScatterTiling {
  int64_t entries;      // rows of x
  int64_t count;        // rows of the result
  int64_t width;        // elements of a row
  int64_t skip;         // row of the result that stays zero, or -1
  int64_t tileRows;     // rows of the result that are summed at once,
  int64_t tileColumns;  // and their columns
  int64_t rowsPerLoad;  // rows of x that are loaded at once
};

constexpr int64_t kScatterChunk = 1024;                   // entries that are looked at together
constexpr int64_t kScatterMaskBytes = kScatterChunk / 8;  // a bit for each
constexpr int64_t kScatterListed = 4096;                  // entries that a list takes; it is full with more
constexpr int64_t kScatterList = kScatterListed + kScatterChunk;
constexpr int64_t kScatterRowBytes = 8 * 1024;  // of rows that are loaded or stored at once
constexpr int64_t kScatterSpan = 1 << 24;       // rows that one list serves

}  // namespace turbogr
