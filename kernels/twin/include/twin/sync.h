// Flags between pipes, barriers within a core and across cores.
#pragma once

#include "tensor.h"

enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {

using TEventID = int8_t;

namespace twin {

void Yield();  // to the other cores, until all have arrived: see launch.h

inline std::optional<Knowledge>& Flag(HardEvent event, int id) {
  if (id < 0 || id >= kEventIds) Fail("event-id", "%s has no event id %d, only 0 to 7", PipesOf(event).name, id);
  return Me().flags[static_cast<int>(event)][id];
}

}  // namespace twin

template <HardEvent event>
void SetFlag(TEventID id) {
  auto& core = twin::Me();
  core.instruction = "SetFlag";
  auto& flag = twin::Flag(event, id);
  if (flag) twin::Fail("unpaired-flag", "SetFlag<%s>(%d) twice without WaitFlag", twin::PipesOf(event).name, id);
  flag = core.clock.After(twin::PipesOf(event).from);
}

template <HardEvent event>
void WaitFlag(TEventID id) {
  auto& core = twin::Me();
  core.instruction = "WaitFlag";
  auto& flag = twin::Flag(event, id);
  if (!flag) twin::Fail("unpaired-flag", "WaitFlag<%s>(%d) that nobody sets: it would hang", twin::PipesOf(event).name, id);
  core.clock.Learn(twin::PipesOf(event).to, *flag);
  flag.reset();
}

template <pipe_t pipe>
void PipeBarrier() {
  static_assert(pipe != PIPE_S, "there is no barrier of the scalar pipe");
  auto& core = twin::Me();
  if constexpr (pipe == PIPE_ALL) {
    core.clock.BarrierAll();
  } else {
    core.clock.Barrier(pipe);
  }
}

template <bool vectorsOnly = true>
void SyncAll() {
  auto& core = twin::Me();
  core.instruction = "SyncAll";
  const auto task = twin::Machine::The().task;
  if (task < KERNEL_TYPE_MIX_AIV_1_0) {
    twin::Fail("sync-all-kernel-type", "SyncAll in a kernel whose type is not one of KERNEL_TYPE_MIX_*");
  }
  core.clock.BarrierAll();
  twin::Yield();
}

enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

// A line of 64 bytes is written back and forgotten; the twin takes the whole cache.
template <typename T, CacheLine line, DcciDst destination = DcciDst::CACHELINE_OUT>
void DataCacheCleanAndInvalid(const GlobalTensor<T>&) {
  twin::Me().flushed = twin::Clock::Number();
}

// --- cores -------------------------------------------------------------------------------------------

inline int64_t GetBlockIdx() { return twin::Me().index; }
inline int64_t GetBlockNum() { return twin::Machine::The().blocks; }
inline int64_t GetSubBlockIdx() { return twin::Me().index % twin::Ratio(); }
inline int64_t GetSubBlockNum() { return twin::Ratio(); }
inline int64_t GetTaskRation() { return twin::Ratio(); }

inline uint8_t* GetSysWorkSpacePtr() { return twin::Machine::The().systemWorkspace; }
inline void SetSysWorkspace(uint8_t*) {}
inline uint8_t* GetUserWorkspace(uint8_t* workspace) { return workspace; }

}  // namespace AscendC
