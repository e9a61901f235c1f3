// From CANN's contexts to the tiling functions of row norms. Needs CANN; not part of the twin.
#pragma once

#include <vector>

#include "cann_launch.h"

namespace turbogr::row_norm_host {

// Dtypes go together by position: weight and bias have that of x, or are floats.
inline std::vector<ge::DataType> RowTypes() {
  return {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT};
}
inline std::vector<ge::DataType> VectorTypes() {
  return {ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT};
}
inline std::vector<ge::DataType> StatTypes() { return std::vector<ge::DataType>(5, ge::DT_FLOAT); }
inline std::vector<ge::Format> Formats() { return std::vector<ge::Format>(5, ge::FORMAT_ND); }

// Rows and width of a problem; all dims but the last count rows.
template <typename Problem>
void SetSizes(const gert::TilingContext* context, size_t input, Problem* problem) {
  const gert::Shape& shape = context->GetInputShape(input)->GetStorageShape();
  const size_t dims = shape.GetDimNum();
  problem->width = dims == 0 ? 1 : shape.GetDim(dims - 1);
  problem->rows = 1;
  for (size_t dim = 0; dim + 1 < dims; ++dim) problem->rows *= shape.GetDim(dim);
  problem->bytes = ge::GetSizeByDataType(context->GetInputDesc(input)->GetDataType());
  problem->cores = VectorCores(context);
}

}  // namespace turbogr::row_norm_host
