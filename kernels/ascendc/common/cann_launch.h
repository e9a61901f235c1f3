// What all ops tell CANN about a launch. Needs CANN; not part of the twin.
#pragma once

#include "launch.h"
#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace turbogr {

inline int64_t VectorCores(const gert::TilingContext* context) {
  return platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetCoreNumAiv();
}

// Fills the tiling struct where the kernel will find it; fails where the tiling function refuses the problem.
template <typename Tiling, typename Problem>
ge::graphStatus SetLaunch(gert::TilingContext* context, const Problem& problem) {
  Tiling* tiling = context->GetTilingData<Tiling>();
  size_t* workspaces = context->GetWorkspaceSizes(1);
  if (tiling == nullptr || workspaces == nullptr) return ge::GRAPH_FAILED;
  const Launch launch = Tile(problem, tiling);
  if (launch.blocks == 0) return ge::GRAPH_FAILED;
  context->SetBlockDim(static_cast<uint32_t>(launch.blocks));
  workspaces[0] = platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetLibApiWorkSpaceSize();
  workspaces[0] += launch.workspace;
  return ge::GRAPH_SUCCESS;
}

}  // namespace turbogr
