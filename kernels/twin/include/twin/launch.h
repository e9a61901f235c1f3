// Runs a kernel on all cores of a machine that is not there.
//
// Cores are fibers: each runs until it ends or calls SyncAll, then the next one. So a run is the same every time, and
// a core that waits for one that ended is known at once.
#pragma once

#include <ucontext.h>

#include <functional>

#include "copy.h"

namespace AscendC {
namespace twin {

class Fleet {
 public:
  static Fleet*& Running() {
    static Fleet* fleet = nullptr;
    return fleet;
  }

  Fleet(std::function<void()> kernel, int blocks) : kernel_(std::move(kernel)), blocks_(blocks) {}

  void Run() {
    auto& machine = Machine::The();
    machine.blocks = blocks_;
    machine.task = KERNEL_TYPE_UNSET;
    GlobalMemory::The().Forget();
    Clear();
    Running() = this;
    // The kernel's type is known once the first core has begun, and with it the number of cores.
    AddCore();
    Resume(0);
    machine.cores = blocks_ * Ratio();
    while (static_cast<int>(cores_.size()) < machine.cores && error_.empty()) {
      AddCore();
      Resume(cores_.size() - 1);
    }
    while (error_.empty() && Waiting()) Release();
    Running() = nullptr;
    machine.current = nullptr;
    fibers_.clear();
    if (!error_.empty()) throw std::runtime_error(error_);
    GlobalMemory::The().CheckRedZones();
  }

  void Yield() {
    auto& fiber = *fibers_[current_];
    fiber.waits = true;
    swapcontext(&fiber.context, &back_);
  }

  static std::vector<std::unique_ptr<Core>>& Cores() { return cores_; }
  static void Clear() { cores_.clear(); }

 private:
  static constexpr size_t kStack = 512 * 1024;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStack]};
    bool ended = false, waits = false;
  };

  void AddCore() {
    cores_.push_back(std::make_unique<Core>(static_cast<int>(cores_.size())));
    fibers_.push_back(std::make_unique<Fiber>());
    auto& fiber = *fibers_.back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &back_;
    makecontext(&fiber.context, &Fleet::Enter, 0);
  }

  static void Enter() { Running()->Body(); }

  void Body() {
    auto& fiber = *fibers_[current_];
    try {
      kernel_();
      CheckEnd(*cores_[current_]);
    } catch (const std::exception& error) {
      error_ = error.what();
    }
    fiber.ended = true;
  }

  static void CheckEnd(Core& core) {
    core.instruction = "end of kernel";
    for (int event = 0; event < kEvents; ++event) {
      for (int id = 0; id < kEventIds; ++id) {
        if (core.flags[event][id]) {
          Fail("unpaired-flag", "SetFlag<%s>(%d) that nobody waits for", PipesOf(HardEvent(event)).name, id);
        }
      }
    }
    if (core.atomic != Atomic::kNone) Fail("atomic-left-on", "SetAtomicNone is missing");
    if (core.leaks) Fail("queue-leak", "%d queue tensors were never freed", core.leaks);
    if (core.pending) Fail("matmul-not-awaited", "%d products that nobody waits for", core.pending);
  }

  void Resume(size_t index) {
    current_ = index;
    Machine::The().current = cores_[index].get();
    swapcontext(&back_, &fibers_[index]->context);
    Machine::The().current = nullptr;
  }

  bool Waiting() const {
    for (const auto& fiber : fibers_) {
      if (fiber->waits) return true;
    }
    return false;
  }

  // All cores have arrived at a SyncAll: they go on, and know of each other's writes.
  void Release() {
    double latest = 0;
    for (size_t i = 0; i < fibers_.size(); ++i) {
      if (fibers_[i]->ended) {
        error_ = "sync-all-missing: a core waits in SyncAll for core " + std::to_string(i) + ", which has ended";
        return;
      }
      latest = std::max(latest, cores_[i]->clock.Finish());
    }
    for (size_t i = 0; i < fibers_.size() && error_.empty(); ++i) {
      fibers_[i]->waits = false;
      ++cores_[i]->epoch;
      cores_[i]->clock.WaitUntil(latest);
      Resume(i);
    }
  }

  std::function<void()> kernel_;
  int blocks_;
  static inline std::vector<std::unique_ptr<Core>> cores_;  // kept for the report
  std::vector<std::unique_ptr<Fiber>> fibers_;
  ucontext_t back_;
  size_t current_ = 0;
  std::string error_;
};

inline void Yield() { Fleet::Running()->Yield(); }

}  // namespace twin

inline void* GmAlloc(size_t bytes) { return twin::GlobalMemory::The().Allocate(bytes); }
inline void GmFree(void* begin) { twin::GlobalMemory::The().Free(begin); }
inline void SetKernelMode(KernelMode mode) { twin::Machine::The().mode = mode; }

}  // namespace AscendC

#define ICPU_RUN_KF(kernel, blocks, ...) AscendC::twin::Fleet([&] { kernel(__VA_ARGS__); }, static_cast<int>(blocks)).Run()
