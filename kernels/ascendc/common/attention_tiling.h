// Tiling that jagged_attention and its backward have in common: how much of a tile fits the unified buffer.
#pragma once

#include <cmath>
#include <cstring>

#include "attention_shape.h"
#include "cube_tiling.h"
#include "launch.h"

namespace turbogr {

constexpr int64_t kUbBytes = 184 * 1024;  // of 192 KB, 8 KB are scratch of Select
constexpr int64_t kMostPairColumns = 2048;  // of bias and mask: a row fits the smallest slab
constexpr int64_t kMostVectorCores = 64;  // kMostCores of schedule.h
constexpr int64_t kLargestPitch = 65535;  // elements between rows of a matrix in global memory

// Of a table of pairs: all 0 without one.
struct PairSizes {
  int64_t sequences, heads, queries, keys;
};

// Sizes of a call, integers first; what attributes and shapes of the op say.
struct AttentionProblem {
  int64_t sequences, queryRows, keyRows, heads, groups, depth, valueDepth;
  int64_t bytes, indexBytes;  // of an element, and of an offset or column
  int64_t softmax, hasValid, positionEntries, positionHeads, timeBounds, timeHeads, minDistance, maxDistance;
  PairSizes bias, mask;
  int64_t gradSequences, gradHeads;  // of the gradient of bias, where it is wanted
  int64_t hasSeed;                   // whether there is dropout_seed: nothing is dropped without
  int64_t wanted, deterministic;     // gradients, for the backward
  int64_t lacking;                   // whether the call asks for what the kernels do not have: see Lacking
  int64_t cores;                     // vector cores
  double scale, postScale, dropout;
};

// What a call asks for and the kernels do not have; empty where they have all. kernels/ascendc/limits.py says the same.
inline const char* Lacking(const char* activation, bool sink, double scoreCap) {
  if (std::strcmp(activation, "softmax") != 0 && std::strcmp(activation, "silu") != 0) return activation;
  if (sink) return "sink";
  return scoreCap != 0.0 ? "score_cap" : "";
}

inline int32_t Clamped(int64_t value, int64_t limit) {
  return static_cast<int32_t>(value < -limit ? -limit : value > limit ? limit : value);
}

inline PairStrides StridesOf(const PairSizes& sizes) {
  PairStrides strides{};
  strides.columns = sizes.keys;
  strides.query = sizes.queries > 1 ? sizes.keys : 0;
  strides.head = sizes.heads > 1 ? sizes.queries * sizes.keys : 0;
  strides.sequence = sizes.sequences > 1 ? sizes.heads * sizes.queries * sizes.keys : 0;
  return strides;
}

// A pair is dropped where its 32 random bits are below p 2^32. As signed numbers those are 0 and up for the smaller
// half; where more than that is dropped, those that are kept are the last ones below 0. A factor of 0 drops all.
inline void SetDropout(const AttentionProblem& p, AttentionShape* shape) {
  if (p.hasSeed == 0 || !(p.dropout > 0.0)) return;
  constexpr int64_t kHalf = int64_t{1} << 31, kAll = int64_t{1} << 32;
  const int64_t limit = static_cast<int64_t>(std::nearbyint(p.dropout * static_cast<double>(kAll)));
  shape->postScale = static_cast<float>(limit < kAll ? p.postScale / (1.0 - p.dropout) : 0.0);
  shape->drops = limit > 0 && limit < kAll;
  shape->dropInside = limit <= kHalf;
  shape->dropLow = static_cast<int32_t>(shape->dropInside ? 0 : limit - kAll);
  shape->dropHigh = static_cast<int32_t>(shape->dropInside ? limit - 1 : -1);
}

inline AttentionShape ShapeOf(const AttentionProblem& p) {
  AttentionShape shape{};
  shape.queryRows = p.queryRows;
  shape.keyRows = p.keyRows;
  shape.sequences = static_cast<int32_t>(p.sequences);
  shape.heads = static_cast<int32_t>(p.heads);
  shape.groups = static_cast<int32_t>(p.groups);
  shape.depth = static_cast<int32_t>(p.depth);
  shape.valueDepth = static_cast<int32_t>(p.valueDepth);
  shape.softmax = p.softmax != 0;
  shape.hasValid = p.hasValid != 0;
  shape.positionEntries = static_cast<int32_t>(p.positionEntries);
  shape.positionHeads = static_cast<int32_t>(p.positionHeads);
  shape.timeBounds = static_cast<int32_t>(p.timeBounds);
  shape.timeHeads = static_cast<int32_t>(p.timeHeads);
  // A search may probe as far beyond the last bound as there are bounds.
  shape.boundSlots = AlignUp(2 * shape.timeBounds + 1, 8);
  shape.bias = StridesOf(p.bias);
  shape.mask = StridesOf(p.mask);
  shape.minDistance = Clamped(p.minDistance, kFarColumn);
  shape.maxDistance = Clamped(p.maxDistance, kFarColumn);
  shape.cores = static_cast<int32_t>(p.cores < kMostVectorCores ? p.cores : kMostVectorCores);
  shape.scale = static_cast<float>(p.scale);
  shape.postScale = static_cast<float>(p.postScale);
  SetDropout(p, &shape);
  return shape;
}

// What AttentionTile::Init takes of the unified buffer, and the schedule.
inline int64_t TileBytes(const AttentionShape& shape, int64_t indexBytes) {
  const bool time = shape.timeHeads > 0, position = shape.positionEntries > 0;
  const bool masks = shape.minDistance > -kFarColumn || shape.maxDistance < kFarColumn || shape.hasValid;
  const bool bias = shape.bias.columns > 0, mask = shape.mask.columns > 0;
  int64_t bytes = 2 * kOffsetChunk * indexBytes;
  if (!masks && !time && !position && !bias && !mask && !shape.drops) return bytes;
  const int64_t rows = kKeyBlock + kRowBlock;
  bytes += 2 * (rows * indexBytes + (time ? rows * 4 : 0) + (shape.hasValid ? kKeyBlock : 0)) + rows * 4;
  if (masks) bytes += (kKeyBlock + 64 + kRowBlock) * 4 + 2 * kRowBlock * 32 + shape.slab / 4 + 2 * kRowBlock * 8 + 32;
  if (bias || mask) bytes += 2 * kKeyBlock * 4;
  if (bias) bytes += shape.slab * 4;
  if (mask) bytes += shape.slab + shape.slab / 8;
  if (shape.drops) bytes += 3 * kRowBlock * 32 + 2 * kKeyBlock * 4 + shape.slab / 8;
  if (position) bytes += kRowBlock * 32 + AlignUp(shape.positionEntries, 8) * 4;
  if (time) {
    bytes += kKeyBlock * 4 + kRowBlock * 32 + (shape.boundSlots + kTimeCells + AlignUp(shape.timeBounds + 1, 8)) * 4;
  }
  return bytes;
}

// Tiling of a product with many rows and few columns: all rows at a time, so that columns are loaded once.
inline TCubeTiling TallCubeTiling(int32_t m, int32_t n, int32_t k, int32_t bytes) {
  TCubeTiling t = CubeTiling(m, n, k, bytes);
  if (m > 256 || n > 128) return t;
  t.baseM = AlignUp(m, 16);
  const int32_t widest = kL0Bytes / 2 / bytes / t.baseM / 16 * 16;
  if (t.baseK > widest) t.baseK = widest;
  t.dbL0C = t.baseM * t.baseN * 4 * 2 <= kL0cBytes ? 2 : 1;
  return t;
}

// Queries of a tile: fewer where there are not as many.
inline int32_t RowBlockFor(const AttentionProblem& p) {
  if (p.queryRows >= kRowBlock) return kRowBlock;
  return AlignUp(static_cast<int32_t>(p.queryRows > 0 ? p.queryRows : 1), 16);
}

// Whether kernels take it at all.
inline bool Possible(const AttentionProblem& p) {
  const bool sizes = p.heads > 0 && p.groups > 0 && p.heads % p.groups == 0 && p.depth > 0 && p.valueDepth > 0;
  const bool pitches = p.heads * p.depth <= kLargestPitch && p.heads * p.valueDepth <= kLargestPitch;
  const bool widths = p.depth <= 512 && p.valueDepth <= 512;
  const bool tables = p.bias.keys <= kMostPairColumns && p.mask.keys <= kMostPairColumns;
  return sizes && pitches && widths && tables && p.lacking == 0 && p.cores > 0;
}

}  // namespace turbogr
