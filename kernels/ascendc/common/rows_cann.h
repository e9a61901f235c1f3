// From CANN's tiling context to the tiling functions of the row kernels. Needs CANN; not part of the twin.
#pragma once

#include "cann_launch.h"
#include "rows_tiling.h"

namespace turbogr {

inline const gert::Shape& InputShape(const gert::TilingContext* context, size_t input) {
  return context->GetInputShape(input)->GetStorageShape();
}

inline int64_t InputBytes(const gert::TilingContext* context, size_t input) {
  return ge::GetSizeByDataType(context->GetInputDesc(input)->GetDataType());
}

// Elements of one row: a product of the dims from `first` on.
inline int64_t Width(const gert::Shape& shape, size_t first) {
  int64_t width = 1;
  for (size_t dim = first; dim < shape.GetDimNum(); ++dim) {
    width *= shape.GetDim(dim);
  }
  return width;
}

}  // namespace turbogr
