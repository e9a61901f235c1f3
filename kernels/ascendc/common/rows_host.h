// From CANN's tiling context to the tiling functions of the row kernels. Needs CANN; not part of the twin.
#pragma once

#include "register/op_def_registry.h"
#include "rows_tiling.h"
#include "tiling/platform/platform_ascendc.h"

namespace turbogr {

inline int64_t VectorCores(const gert::TilingContext* context) {
  return platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetCoreNumAiv();
}

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

// Fills the tiling struct where the kernel will find it.
template <typename Tiling, typename Problem>
ge::graphStatus SetLaunch(gert::TilingContext* context, const Problem& problem) {
  Tiling* tiling = context->GetTilingData<Tiling>();
  size_t* workspaces = context->GetWorkspaceSizes(1);
  if (tiling == nullptr || workspaces == nullptr) {
    return ge::GRAPH_FAILED;
  }
  const Launch launch = Tile(problem, tiling);
  const auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
  context->SetBlockDim(static_cast<uint32_t>(launch.blocks));
  workspaces[0] = platform.GetLibApiWorkSpaceSize() + launch.workspace;
  return ge::GRAPH_SUCCESS;
}

}  // namespace turbogr
