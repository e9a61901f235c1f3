// From CANN's contexts to the tiling functions of sampled softmax. Needs CANN; not part of the twin.
#pragma once

#include <vector>

#include "cann_launch.h"

namespace turbogr::sampled_host {

// Dtypes go together by position.
inline std::vector<ge::DataType> SampledRowTypes() {
  return {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT};
}
inline std::vector<ge::DataType> SampledOffsetTypes() {
  return {ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64};
}
inline std::vector<ge::DataType> SampledIdTypes() { return std::vector<ge::DataType>(6, ge::DT_INT32); }
inline std::vector<ge::DataType> SampledFloatTypes() { return std::vector<ge::DataType>(6, ge::DT_FLOAT); }
inline std::vector<ge::Format> SampledFormats() { return std::vector<ge::Format>(6, ge::FORMAT_ND); }

// Sizes of a problem; `query` is the place of that input, and those behind it follow.
template <typename Problem>
void SetSizes(const gert::TilingContext* context, size_t query, Problem* problem) {
  const gert::Shape& rows = context->GetInputShape(query)->GetStorageShape();
  problem->rows = rows.GetDim(0);
  problem->width = rows.GetDim(1);
  problem->negatives = context->GetInputShape(query + 2)->GetStorageShape().GetDim(0);
  problem->groups = context->GetInputShape(query + 3)->GetStorageShape().GetDim(0) - 1;
  problem->bytes = ge::GetSizeByDataType(context->GetInputDesc(query)->GetDataType());
  problem->hasIds = context->GetOptionalInputShape(query + 6) != nullptr;
  problem->hasScales = context->GetOptionalInputShape(query + 7) != nullptr;
  problem->scale = *context->GetAttrs()->GetFloat(0);
  problem->cores = VectorCores(context);
}

}  // namespace turbogr::sampled_host
