// Sizes that jagged_attention and its backward have in common; plain data, part of both tiling structs.
#pragma once

#include <cstdint>

namespace turbogr {

constexpr int32_t kColumnUnit = 16;      // columns of a tile come in such steps: 32 bytes of halves
constexpr int32_t kKeyBlock = 256;       // keys of a tile
constexpr int32_t kRowBlock = 128;       // queries of a tile, at most
constexpr int32_t kTimeCells = 640;      // gaps as floats, by exponent and two bits of the mantissa: 635 is the last
constexpr int32_t kTimeCellShift = 21;   // bits of a float below that
constexpr int32_t kFarTime = (1 << 30) - 1;  // times are within this of each other's origin, so gaps fit int32
constexpr int32_t kFarColumn = 1 << 24;  // columns are below this, so that floats tell them apart
constexpr int32_t kOffsetChunk = 128;    // offsets that are looked at a time

// Of a dense table of pairs: its key columns, 0 where there is none, and strides, 0 where one entry stands for all.
struct PairStrides {
  int64_t columns, sequence, head, query;
};

struct AttentionShape {
  int64_t queryRows, keyRows;
  int32_t sequences;
  int32_t heads, groups, depth, valueDepth;
  int32_t softmax;                      // or silu
  int32_t hasValid;                     // whether there is key_valid
  int32_t positionEntries;              // 2M - 1 of each head, 0 without position_bias
  int32_t positionHeads;                // rows of position_bias: heads or 1
  int32_t timeBounds;                   // K
  int32_t timeHeads;                    // rows of time_bias, of K + 1 entries: heads or 1; 0 without time_bias
  int32_t boundSlots;                   // entries of the table of bounds in UB: K and what a search may probe beyond
  int32_t minDistance, maxDistance;     // clamped to what columns can be apart
  int32_t rowBlock;                     // queries of a tile
  int32_t slab;                         // elements of a tile that the vector unit takes at a time
  int32_t cores;                        // vector cores at work
  float scale, postScale;               // the latter with what dropout multiplies by
  PairStrides bias, mask;
  // Random bits of a pair, as signed numbers: those in [dropLow, dropHigh] are dropped, or kept where not dropInside.
  int32_t drops;                        // or no bits are needed
  int32_t dropInside, dropLow, dropHigh;
};

}  // namespace turbogr
