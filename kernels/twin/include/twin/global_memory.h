// Global memory: allocations between red zones, with a record of which core and pipe touched each pair of bytes last.
//
// Cores know of each other's writes only behind a SyncAll, which begins a new epoch. Atomic additions of several cores
// may meet in one epoch; nobody may read the sums before the next.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "local_memory.h"

namespace AscendC::twin {

constexpr size_t kRedZone = 512;
constexpr uint8_t kRed = 0xEE;
constexpr int kNobody = 0, kSeveral = -1;  // cores count from 1, so that a record of zeros says nothing

struct Visitor {
  const Clock& clock;
  Touch by;
  int core;
  uint32_t epoch;
  uint32_t flushed;  // number of the last instruction before this core's data cache was cleaned
};

class Allocation {
 public:
  Allocation(size_t bytes, bool watched) : bytes_(bytes), memory_(bytes + 2 * kRedZone, kRed) {
    std::memset(Begin(), 0xA5, bytes);
    if (watched) count_ = bytes / 2 + 1;
    Forget();
    touched_.resize(bytes / kBlock + 1);
  }

  uint8_t* Begin() { return memory_.data() + kRedZone; }
  size_t Bytes() const { return bytes_; }
  bool Intact() const {
    for (size_t i = 0; i < kRedZone; ++i) {
      if (memory_[i] != kRed || memory_[kRedZone + bytes_ + i] != kRed) return false;
    }
    return true;
  }
  void Forget() {
    // Zeros from the system cost nothing until they are written, and most of a workspace never is.
    if (count_) cells_.reset(static_cast<Cell*>(std::calloc(count_, sizeof(Cell))));
    std::fill(touched_.begin(), touched_.end(), false);
  }

  // Bytes of blocks that no core touched before: those come from memory, others from the L2 cache.
  size_t FirstTouch(size_t offset, size_t count) {
    size_t fresh = 0;
    for (size_t block = offset / kBlock; count && block <= (offset + count - 1) / kBlock; ++block) {
      fresh += !touched_[block];
      touched_[block] = true;
    }
    return std::min(fresh * kBlock, count);
  }

  void Read(const Visitor& v, size_t offset, size_t count) {
    ForCells(offset, count, [&](Cell& cell, size_t at) {
      if (cell.written) CheckWritten("reads", v, cell, at, false);
      if (cell.reader != v.core && cell.reader != kNobody && cell.readEpoch == v.epoch) {
        cell.reader = kSeveral;
      } else {
        if (cell.reader != v.core) std::fill(std::begin(cell.read), std::end(cell.read), 0);
        cell.reader = v.core;
        cell.read[Slot(v.by.pipe)] = v.by.number;
      }
      cell.readEpoch = v.epoch;
    });
  }

  void Write(const Visitor& v, size_t offset, size_t count, bool atomic) {
    ForCells(offset, count, [&](Cell& cell, size_t at) {
      if (cell.written) CheckWritten("overwrites", v, cell, at, atomic);
      CheckRead(v, cell, at);
      const bool joint = atomic && cell.atomic && cell.written && cell.writer != v.core && cell.writeEpoch == v.epoch;
      cell.writer = joint ? kSeveral : v.core;
      cell.written = v.by.number;
      cell.writeEpoch = v.epoch;
      cell.pipe = v.by.pipe;
      cell.atomic = atomic;
      cell.instruction = v.by.instruction;
      cell.reader = kNobody;
    });
  }

 private:
  struct Cell {
    const char* instruction;
    uint32_t written, read[3];  // by MTE2, the cube and the scalar unit
    uint32_t writeEpoch, readEpoch;
    int16_t writer, reader;
    uint8_t pipe;
    bool atomic;
  };
  static constexpr int kReaders[3] = {PIPE_MTE2, PIPE_M, PIPE_S};
  static int Slot(int pipe) { return pipe == PIPE_MTE2 ? 0 : pipe == PIPE_M ? 1 : 2; }

  static void CheckWritten(const char* what, const Visitor& v, const Cell& cell, size_t at, bool atomic) {
    if (atomic && cell.atomic) return;
    if (cell.writer != v.core) {
      if (cell.writeEpoch < v.epoch) return CheckCache(v, cell, at);
      Fail("missing-sync", "%s (%s) %s GM bytes from %zu that another core wrote with %s, without SyncAll in between",
           v.by.instruction, PipeName(v.by.pipe), what, at, cell.instruction);
    }
    const bool inOrder = cell.pipe == v.by.pipe && (cell.pipe == PIPE_S || (cell.pipe == PIPE_M && what[0] == 'o'));
    if (!inOrder && cell.writeEpoch == v.epoch && !v.clock.Knows(v.by.pipe, cell.pipe, cell.written) &&
        cell.written != v.by.number) {
      Fail("missing-sync", "%s (%s) %s GM bytes from %zu that %s (%s) wrote, without synchronisation in between",
           v.by.instruction, PipeName(v.by.pipe), what, at, cell.instruction, PipeName(cell.pipe));
    }
    CheckCache(v, cell, at);
  }

  // The scalar unit reads and writes through a cache of its own.
  static void CheckCache(const Visitor& v, const Cell& cell, size_t at) {
    const bool mine = cell.writer == v.core && cell.pipe == PIPE_S;
    if ((v.by.pipe == PIPE_S) == mine || v.flushed >= cell.written) return;
    if (v.by.pipe != PIPE_S && cell.pipe != PIPE_S) return;
    Fail("stale-cache", "%s (%s) uses GM bytes from %zu that %s (%s) wrote: DataCacheCleanAndInvalid is missing",
         v.by.instruction, PipeName(v.by.pipe), at, cell.instruction, PipeName(cell.pipe));
  }

  static void CheckRead(const Visitor& v, const Cell& cell, size_t at) {
    if (cell.reader == kNobody || cell.readEpoch < v.epoch) return;
    if (cell.reader != v.core) {
      Fail("missing-sync", "%s (%s) overwrites GM bytes from %zu that another core may still read", v.by.instruction,
           PipeName(v.by.pipe), at);
    }
    for (int slot = 0; slot < 3; ++slot) {
      if (cell.read[slot] && kReaders[slot] != v.by.pipe && cell.read[slot] != v.by.number &&
          !v.clock.Knows(v.by.pipe, kReaders[slot], cell.read[slot]) && kReaders[slot] != PIPE_S) {
        Fail("missing-sync", "%s (%s) overwrites GM bytes from %zu that %s may still read", v.by.instruction,
             PipeName(v.by.pipe), at, PipeName(kReaders[slot]));
      }
    }
  }

  template <typename F>
  void ForCells(size_t offset, size_t count, F f) {
    if (count == 0 || count_ == 0) return;
    for (size_t i = offset / 2; i <= (offset + count - 1) / 2; ++i) f(cells_[i], i * 2);
  }

  size_t bytes_;
  std::vector<uint8_t> memory_;
  struct Release {
    void operator()(Cell* cells) const { std::free(cells); }
  };
  size_t count_ = 0;
  std::unique_ptr<Cell[], Release> cells_;
  std::vector<bool> touched_;
};

// All allocations of this process.
class GlobalMemory {
 public:
  static GlobalMemory& The() {
    static GlobalMemory memory;
    return memory;
  }

  void* Allocate(size_t bytes) {
    auto made = std::make_unique<Allocation>(bytes, watched);
    void* begin = made->Begin();
    all_[static_cast<uint8_t*>(begin)] = std::move(made);
    return begin;
  }
  void Free(void* begin) {
    auto found = all_.find(static_cast<uint8_t*>(begin));
    if (found == all_.end()) Fail("bad-free", "GmFree of an address that GmAlloc did not return");
    const bool intact = found->second->Intact();
    all_.erase(found);
    if (!intact) Fail("red-zone", "bytes around an allocation of global memory have changed");
  }
  // The allocation that holds these bytes; a fault where there is none.
  Allocation& Find(const void* at, size_t count, const char* instruction) {
    const auto* address = static_cast<const uint8_t*>(at);
    if (address == nullptr) Fail("out-of-bounds", "%s uses a null address of GM", instruction);
    auto next = all_.upper_bound(const_cast<uint8_t*>(address));
    if (next == all_.begin()) Fail("out-of-bounds", "%s uses an address that is no GM", instruction);
    auto& found = *std::prev(next);
    if (address + count > found.first + found.second->Bytes()) {
      Fail("out-of-bounds", "%s touches %zu bytes of GM at byte %td of an allocation of %zu", instruction, count,
           address - found.first, found.second->Bytes());
    }
    return *found.second;
  }
  void Forget() {
    for (auto& [begin, allocation] : all_) allocation->Forget();
  }
  void CheckRedZones() {
    for (auto& [begin, allocation] : all_) {
      if (!allocation->Intact()) Fail("red-zone", "bytes around an allocation of global memory have changed");
    }
  }

  bool watched = true;  // whether later allocations keep a record of who touched them

 private:
  std::map<uint8_t*, std::unique_ptr<Allocation>> all_;
};

}  // namespace AscendC::twin
