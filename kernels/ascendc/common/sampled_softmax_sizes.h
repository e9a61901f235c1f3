// Sizes that sampled_softmax and its backward have in common, on the host and on the device.
#pragma once

#include <cstdint>

namespace turbogr {

constexpr int32_t kMostSampledWidth = 512;       // elements of a row; a multiple of 16
constexpr int32_t kMostBlock = 128;              // rows of a block
constexpr int32_t kTile = 512;                   // rows of the other side that it meets at a time
constexpr int32_t kStrip = 256;                  // columns of a tile that the vector unit takes at a time
constexpr int32_t kStripElements = 8 * 1024;     // logits it takes at a time, where they become 16 bits wide
constexpr int32_t kWideElements = 4 * 1024;      // elements of rows that are widened to floats at a time

// What rows meet: rows of one side are cut into blocks, and each block meets the other side tile by tile.
struct SampledSweep {
  int32_t block;     // rows of a block, at most
  int32_t tile;      // rows of the other side: kTile, or all where there are fewer; a multiple of 64
  int32_t slot;      // logits of a block and a tile
  int32_t loadRows;  // the cube loads a row of the other side as fast as the vector core does so many logits
};

// Part of the tiling of both kernels.
struct SampledShape {
  int32_t rows;
  int32_t negatives;
  int32_t groups;
  int32_t width;
  int32_t hasIds;
  int32_t hasScales;
  float scale;
  int32_t padding;
  int64_t coreBytes;  // of the workspace, for each vector core
};

}  // namespace turbogr
