// Sizes for norms of rows: without CANN, so that tests exercise what the host computes.
#pragma once

#include <cstdint>

namespace turbogr::row_norm_host {

constexpr int64_t kUnifiedBytes = 176 * 1024;  // of 192 KB: the system keeps 8 KB, the rest is a margin
constexpr int64_t kLanes = 64;                 // floats of one repeat
constexpr int64_t kMostPitch = 255 * 8;        // floats from a row to the next that a repeat stride can tell
constexpr int64_t kMostRows = 248;             // repeats of an instruction, in whole groups of eight
constexpr int64_t kMostWidth = 8192;
constexpr int64_t kLeastBuffer = 2048;  // bytes of a queue's buffer, which carries weights and partial sums as well

inline int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t Parts(int64_t value, int64_t size) { return (value + size - 1) / size; }
inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }

// Columns that are worked on at a time where a row is cut into `parts`. Parts begin at whole repeats.
inline int64_t BlockColumns(int64_t width, int64_t parts, int64_t bytes) {
  return parts == 1 ? RoundUp(width, 32 / bytes) : RoundUp(Parts(width, parts), kLanes);
}

// Rows per tile so that all tiles of `rows` are about as large.
inline int64_t Evenly(int64_t rows, int64_t most) { return rows < 1 ? 1 : Parts(rows, Parts(rows, most)); }

}  // namespace turbogr::row_norm_host
