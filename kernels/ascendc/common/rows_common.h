// What the row kernels share on the device.
#pragma once

#include "kernel_operator.h"
#include "rows_tiling_data.h"

namespace turbogr {

struct RowRange {
  int64_t begin;
  int64_t end;
};

// Rows of one core: all cores have as many, or one less.
__aicore__ inline RowRange ShareOfRows(int64_t rows, int64_t core, int64_t cores) {
  const int64_t each = rows / cores;
  const int64_t more = rows % cores;
  const int64_t begin = core * each + (core < more ? core : more);
  return {begin, begin + each + (core < more ? 1 : 0)};
}

__aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

__aicore__ inline int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The second pipe of the event waits for what the first one has been told so far.
template <AscendC::HardEvent event>
__aicore__ inline void Fence(AscendC::TPipe* pipe) {
  const event_t id = static_cast<event_t>(pipe->FetchEventID(event));
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

}  // namespace turbogr
