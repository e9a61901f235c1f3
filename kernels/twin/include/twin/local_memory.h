// Unified buffer of a core: 192 KB, poisoned, with a record of who touched each block of 32 bytes last.
#pragma once

#include <vector>

#include "clock.h"
#include "fault.h"

namespace AscendC::twin {

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kUbReserve = 8 * 1024;  // scratch of high-level calls, at the end
constexpr uint32_t kBlock = 32;
// A NaN in every floating type, and an index far out of range: what is used without being written shows.
constexpr uint32_t kPoison = 0xffa5ffa5;

struct Touch {
  const char* instruction;
  uint32_t number;
  int pipe;
};

class LocalMemory {
 public:
  LocalMemory() : bytes_(kUbBytes / 4), cells_(kUbBytes / kBlock) { Poison(0, kUbBytes); }

  uint8_t* At(uint32_t offset) { return reinterpret_cast<uint8_t*>(bytes_.data()) + offset; }
  void Poison(uint32_t offset, uint32_t count) {
    std::fill_n(bytes_.begin() + offset / 4, count / 4, kPoison);
  }

  void Read(const Clock& clock, const Touch& by, uint32_t offset, uint32_t count) {
    ForBlocks(offset, count, [&](Cell& cell, uint32_t at) {
      if (cell.written && !Ordered(clock, by, cell.writer, cell.written)) Race("reads", by, cell, at);
      cell.read[by.pipe] = by.number;
    });
  }

  void Write(const Clock& clock, const Touch& by, uint32_t offset, uint32_t count) {
    ForBlocks(offset, count, [&](Cell& cell, uint32_t at) {
      if (cell.written && !Ordered(clock, by, cell.writer, cell.written)) Race("overwrites", by, cell, at);
      for (int pipe = 0; pipe < kPipes; ++pipe) {
        if (pipe != by.pipe && cell.read[pipe] && !clock.Knows(by.pipe, pipe, cell.read[pipe])) {
          Fail("missing-sync", "%s (%s) overwrites UB bytes from %u that %s may still read", by.instruction,
               PipeName(by.pipe), at, PipeName(pipe));
        }
      }
      cell.written = by.number;
      cell.writer = by.pipe;
      cell.instruction = by.instruction;
      for (auto& read : cell.read) read = 0;
    });
  }

 private:
  struct Cell {
    uint32_t written = 0;
    int writer = 0;
    const char* instruction = "";
    uint32_t read[kPipes] = {};
  };

  // Scalars follow each other; vector instructions and copies do so only behind a barrier.
  static bool Ordered(const Clock& clock, const Touch& by, int writer, uint32_t number) {
    if (writer == by.pipe && (writer == PIPE_S || number == by.number)) return true;
    return clock.Knows(by.pipe, writer, number);
  }

  [[noreturn]] static void Race(const char* what, const Touch& by, const Cell& cell, uint32_t at) {
    Fail("missing-sync", "%s (%s) %s UB bytes from %u that %s (%s) wrote, without synchronisation in between",
         by.instruction, PipeName(by.pipe), what, at, cell.instruction, PipeName(cell.writer));
  }

  template <typename F>
  void ForBlocks(uint32_t offset, uint32_t count, F f) {
    if (count == 0) return;
    for (uint32_t block = offset / kBlock; block <= (offset + count - 1) / kBlock; ++block) {
      f(cells_[block], block * kBlock);
    }
  }

  std::vector<uint32_t> bytes_;
  std::vector<Cell> cells_;
};

}  // namespace AscendC::twin
