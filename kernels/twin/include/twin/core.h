// One vector core, and the cube core's work on its behalf.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "global_memory.h"
#include "rates.h"
#include "types.h"

enum class KernelMode { MIX_MODE = 0, AIC_MODE, AIV_MODE, MIX_AIC_1_1 };
enum KernelTask {
  KERNEL_TYPE_UNSET,
  KERNEL_TYPE_AIV_ONLY,
  KERNEL_TYPE_AIC_ONLY,
  KERNEL_TYPE_MIX_AIV_1_0,
  KERNEL_TYPE_MIX_AIC_1_1,
  KERNEL_TYPE_MIX_AIC_1_2
};

namespace AscendC {

enum class HardEvent : uint8_t {
  MTE2_V, V_MTE2, MTE3_V, V_MTE3, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, MAX
};

namespace twin {

constexpr int kEvents = static_cast<int>(HardEvent::MAX);
constexpr int kEventIds = 8;

struct EventPipes {
  int from, to;
  const char* name;
};
inline const EventPipes& PipesOf(HardEvent event) {
  static constexpr EventPipes pipes[kEvents] = {
      {PIPE_MTE2, PIPE_V, "MTE2_V"},       {PIPE_V, PIPE_MTE2, "V_MTE2"},       {PIPE_MTE3, PIPE_V, "MTE3_V"},
      {PIPE_V, PIPE_MTE3, "V_MTE3"},       {PIPE_MTE3, PIPE_MTE2, "MTE3_MTE2"}, {PIPE_MTE2, PIPE_MTE3, "MTE2_MTE3"},
      {PIPE_S, PIPE_V, "S_V"},             {PIPE_V, PIPE_S, "V_S"},             {PIPE_S, PIPE_MTE2, "S_MTE2"},
      {PIPE_MTE2, PIPE_S, "MTE2_S"},       {PIPE_S, PIPE_MTE3, "S_MTE3"},       {PIPE_MTE3, PIPE_S, "MTE3_S"}};
  return pipes[static_cast<int>(event)];
}

enum class Atomic { kNone, kFloat, kHalf, kBFloat, kInt32, kInt16 };

struct Counters {
  std::map<std::string, double> bytes;             // by path
  std::map<std::string, double> elements;          // by vector instruction and type
  std::map<std::string, double> cycles;            // of the vector pipe, by the same names
  std::map<std::string, double> instructions;      // by pipe
  double macs = 0;
  double cubeCycles = 0, cubeLoadCycles = 0, cubeStoreCycles = 0;  // of the cube core for this vector core
};

struct Core {
  explicit Core(int index) : index(index) {}

  int index;
  LocalMemory ub;
  Clock clock;
  Counters counters;
  std::optional<Knowledge> flags[kEvents][kEventIds];
  bool taken[kEvents][kEventIds] = {};  // ids that AllocEventID handed out
  Atomic atomic = Atomic::kNone;
  uint32_t epoch = 0, flushed = 0;
  uint32_t ubUsed = 0;
  int matmuls = 0, pending = 0;  // objects; products nobody has waited for
  int leaks = 0;                 // queue tensors that were not freed when their pipe ended
  bool hasPipe = false;
  const char* instruction = "";
};

struct Machine {
  KernelMode mode = KernelMode::AIV_MODE;
  KernelTask task = KERNEL_TYPE_UNSET;
  int blocks = 0;
  int cores = 0;  // vector cores
  Core* current = nullptr;
  uint8_t* systemWorkspace = nullptr;

  static Machine& The() {
    static Machine machine;
    return machine;
  }
};

inline Core& Me() {
  Core* core = Machine::The().current;
  if (core == nullptr) throw Fault("no-kernel", "a call that only a kernel may make");
  return *core;
}

inline std::string Where() {
  const Core* core = Machine::The().current;
  return core ? " [core " + std::to_string(core->index) + ", " + core->instruction + "]" : "";
}

// Vector cores of a block: two where a cube core goes with them.
inline int Ratio() {
  const auto& machine = Machine::The();
  return machine.mode == KernelMode::MIX_MODE && machine.task != KERNEL_TYPE_MIX_AIV_1_0 ? 2 : 1;
}

// An instruction under way: dispatched to its pipe, about to touch memory.
class Instruction {
 public:
  Instruction(const char* name, int pipe, double cycles) : core_(Me()) {
    core_.instruction = name;
    ++core_.counters.instructions[PipeName(pipe)];
    touch_ = {name, core_.clock.Issue(pipe, cycles), pipe};
  }

  void ReadLocal(uint32_t offset, uint32_t bytes) { core_.ub.Read(core_.clock, touch_, offset, bytes); }
  void WriteLocal(uint32_t offset, uint32_t bytes) { core_.ub.Write(core_.clock, touch_, offset, bytes); }
  const uint8_t* ReadGlobal(const void* at, size_t bytes) {
    auto& allocation = GlobalMemory::The().Find(at, bytes, touch_.instruction);
    allocation.Read(Visit(), static_cast<const uint8_t*>(at) - allocation.Begin(), bytes);
    return static_cast<const uint8_t*>(at);
  }
  void WriteGlobal(void* at, size_t bytes, bool atomic) {
    auto& allocation = GlobalMemory::The().Find(at, bytes, touch_.instruction);
    allocation.Write(Visit(), static_cast<uint8_t*>(at) - allocation.Begin(), bytes, atomic);
  }

 private:
  Visitor Visit() const { return {core_.clock, touch_, core_.index + 1, core_.epoch, core_.flushed}; }

  Core& core_;
  Touch touch_;
};

inline double FreshBytes(const void* at, size_t bytes, const char* instruction) {
  auto& allocation = GlobalMemory::The().Find(at, bytes, instruction);
  return allocation.FirstTouch(static_cast<const uint8_t*>(at) - allocation.Begin(), bytes);
}

}  // namespace twin
}  // namespace AscendC
