// From CANN's contexts to the tiling functions of attention. Needs CANN; not part of the twin.
#pragma once

#include <cstring>
#include <vector>

#include "attention_tiling.h"
#include "cann_launch.h"

namespace turbogr::attention_host {

// Dtypes go together by position.
inline std::vector<ge::DataType> AttentionRowTypes() {
  return {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT};
}
inline std::vector<ge::DataType> AttentionIndexTypes() {
  return {ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64};
}
inline std::vector<ge::DataType> AttentionFloatTypes() { return std::vector<ge::DataType>(6, ge::DT_FLOAT); }
inline std::vector<ge::DataType> AttentionBoolTypes() { return std::vector<ge::DataType>(6, ge::DT_BOOL); }
inline std::vector<ge::DataType> AttentionTimeTypes() { return std::vector<ge::DataType>(6, ge::DT_INT32); }
inline std::vector<ge::DataType> AttentionSeedTypes() { return std::vector<ge::DataType>(6, ge::DT_INT64); }
inline std::vector<ge::Format> AttentionFormats() { return std::vector<ge::Format>(6, ge::FORMAT_ND); }

// Places of inputs behind the first one that forward and backward share, and of attributes.
enum AttentionInput : size_t {
  kQuery, kKey, kValue, kQueryOffsets, kKeyOffsets, kQueryColumns, kKeyColumns, kKeyValid, kPairMask, kBias,
  kPositionBias, kTimeBias, kTimeBounds, kQueryTimes, kKeyTimes, kDropoutSeed, kSink
};
enum AttentionAttribute : size_t {
  kActivation, kScale, kPostScale, kMinDistance, kMaxDistance, kDropout, kScoreCap, kWanted
};

inline const gert::Shape* Given(const gert::TilingContext* context, size_t input) {
  const auto* shape = context->GetOptionalInputShape(input);
  return shape == nullptr ? nullptr : &shape->GetStorageShape();
}

inline PairSizes SizesOf(const gert::Shape* table) {
  if (table == nullptr) return {};
  return {table->GetDim(0), table->GetDim(1), table->GetDim(2), table->GetDim(3)};
}

// Sizes of a problem; `first` is the place of query.
inline void SetProblem(const gert::TilingContext* context, size_t first, AttentionProblem* p) {
  const auto* attributes = context->GetAttrs();
  const gert::Shape& query = context->GetInputShape(first + kQuery)->GetStorageShape();
  const gert::Shape& key = context->GetInputShape(first + kKey)->GetStorageShape();
  p->sequences = context->GetInputShape(first + kQueryOffsets)->GetStorageShape().GetDim(0) - 1;
  p->queryRows = query.GetDim(0);
  p->keyRows = key.GetDim(0);
  p->heads = query.GetDim(1);
  p->groups = key.GetDim(1);
  p->depth = query.GetDim(2);
  p->valueDepth = context->GetInputShape(first + kValue)->GetStorageShape().GetDim(2);
  p->bytes = ge::GetSizeByDataType(context->GetInputDesc(first + kQuery)->GetDataType());
  p->indexBytes = ge::GetSizeByDataType(context->GetInputDesc(first + kQueryOffsets)->GetDataType());
  p->softmax = std::strcmp(attributes->GetStr(kActivation), "softmax") == 0;
  p->hasValid = Given(context, first + kKeyValid) != nullptr;
  p->bias = SizesOf(Given(context, first + kBias));
  p->mask = SizesOf(Given(context, first + kPairMask));
  p->hasSeed = Given(context, first + kDropoutSeed) != nullptr;
  const bool sink = Given(context, first + kSink) != nullptr;
  p->lacking = *Lacking(attributes->GetStr(kActivation), sink, *attributes->GetFloat(kScoreCap)) != '\0';
  const gert::Shape* position = Given(context, first + kPositionBias);
  p->positionEntries = position == nullptr ? 0 : position->GetDim(1);
  p->positionHeads = position == nullptr ? 0 : position->GetDim(0);
  const gert::Shape* time = Given(context, first + kTimeBias);
  p->timeBounds = time == nullptr ? 0 : time->GetDim(1) - 1;
  p->timeHeads = time == nullptr ? 0 : time->GetDim(0);
  p->minDistance = *attributes->GetInt(kMinDistance);
  p->maxDistance = *attributes->GetInt(kMaxDistance);
  p->deterministic = context->GetDeterministic() != 0;
  p->cores = VectorCores(context);
  p->scale = *attributes->GetFloat(kScale);
  p->postScale = *attributes->GetFloat(kPostScale);
  p->dropout = *attributes->GetFloat(kDropout);
}

}  // namespace turbogr::attention_host
