// The part of AscendC that turbogr's kernels use, emulated on a CPU. What is not here does not compile.
//
// Results are computed at once, in program order; synchronisation is checked beside it. See docs/ascend.md.
#pragma once

#define TURBOGR_CPU_TWIN 1
#ifndef ASCENDC_CPU_DEBUG
#define ASCENDC_CPU_DEBUG 1
#endif

#define __global__
#define __aicore__
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t*

#include "twin/copy.h"

#define ASCEND_IS_AIV constexpr(true)
#define ASCEND_IS_AIC constexpr(false)
#define KERNEL_TASK_TYPE_DEFAULT(type) (AscendC::twin::Machine::The().task = (type))
#define REGISTER_TILING_DEFAULT(type) static_assert(std::is_trivially_copyable_v<type>, "tiling data is copied as bytes")
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) \
  type name;                                             \
  std::memcpy(static_cast<void*>(&name), (address), sizeof(type))
#define TILING_KEY_IS(key) ((key) == 0)
#define ASCENDC_ASSERT(condition, message) \
  ((condition) ? void() : AscendC::twin::Fail("assert", "%s", #condition))
#define ascendc_assert ASCENDC_ASSERT
