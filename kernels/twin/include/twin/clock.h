// What each pipe knows to be complete, and when: the order that synchronisation makes, and nothing else.
//
// Pipes run on their own. An instruction is dispatched by the scalar unit, so it follows all that the scalar unit has
// waited for; it follows instructions of other pipes only where a flag, a queue or a barrier says so. `Knowledge` holds,
// for each pipe, the number of the last instruction known to be complete, and the time at which that was known.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };

namespace AscendC::twin {

constexpr int kPipes = 8;
inline const char* PipeName(int pipe) {
  constexpr const char* names[kPipes] = {"S", "V", "cube", "MTE1", "MTE2", "MTE3", "all", "FIX"};
  return names[pipe];
}

struct Knowledge {
  std::array<uint32_t, kPipes> upTo{};
  double time = 0;

  void Learn(const Knowledge& other) {
    for (int pipe = 0; pipe < kPipes; ++pipe) upTo[pipe] = std::max(upTo[pipe], other.upTo[pipe]);
    time = std::max(time, other.time);
  }
};

class Clock {
 public:
  Clock() { Restart(); }

  void Restart() {
    knows_ = {};
    free_ = busy_ = {};
    last_ = {};
  }

  // Dispatches an instruction that keeps its pipe busy for some cycles; returns its number.
  uint32_t Issue(int pipe, double cycles) {
    knows_[PIPE_S].time += 1;
    if (pipe != PIPE_S) {
      Knowledge dispatched = knows_[PIPE_S];
      knows_[pipe].Learn(dispatched);
    }
    const double start = std::max(free_[pipe], knows_[pipe].time);
    free_[pipe] = start + cycles;
    busy_[pipe] += cycles;
    if (pipe == PIPE_S) knows_[PIPE_S].time = free_[PIPE_S];
    return last_[pipe] = ++number_;
  }

  // All that a pipe was given so far, as a flag set behind it would tell.
  Knowledge After(int pipe) const {
    Knowledge done = knows_[pipe];
    done.upTo[pipe] = last_[pipe];
    done.time = std::max(done.time, free_[pipe]);
    return done;
  }

  void Learn(int pipe, const Knowledge& event) { knows_[pipe].Learn(event); }
  void Barrier(int pipe) { knows_[pipe].Learn(After(pipe)); }
  void BarrierAll() {
    Knowledge all;
    for (int pipe = 0; pipe < kPipes; ++pipe) all.Learn(After(pipe));
    for (auto& knows : knows_) knows.Learn(all);
  }
  // The others arrive as late as the last one.
  void WaitUntil(double time) { knows_[PIPE_S].time = std::max(knows_[PIPE_S].time, time); }

  bool Knows(int pipe, int writer, uint32_t number) const { return knows_[pipe].upTo[writer] >= number; }
  double Busy(int pipe) const { return busy_[pipe]; }
  double Finish() const {
    double finish = 0;
    for (int pipe = 0; pipe < kPipes; ++pipe) finish = std::max(finish, After(pipe).time);
    return finish;
  }
  static uint32_t Number() { return number_; }

 private:
  static inline uint32_t number_ = 0;  // of the last instruction of any core
  std::array<Knowledge, kPipes> knows_;
  std::array<double, kPipes> free_, busy_;
  std::array<uint32_t, kPipes> last_;
};

}  // namespace AscendC::twin
