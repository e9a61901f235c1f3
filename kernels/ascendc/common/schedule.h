// Who computes what: units of unequal cost, dealt to cores on the device, where the lengths of sequences are known.
//
// A place is a block of a sequence; each place has `members` units (heads) of the same cost. Every core walks over all
// places twice. The first walk counts units by class of cost. Then, from the costly classes to the cheap ones, each
// unit goes to the core that has least to do so far; all that this core keeps of it is which of a class are its own.
// The second walk tells them: it runs beside the work, one unit ahead. Units of a class are taken to cost the same.
// A unit is computed by one core as a whole, so results do not depend on the number of cores.
#pragma once

#include "kernel_operator.h"

namespace turbogr {

using namespace AscendC;

constexpr int32_t kCostClasses = 256;
constexpr int32_t kMostCores = 64;

// Classes grow with the cost, by a sixteenth of it: a class is a power of two and the four bits below.
__aicore__ inline int32_t CostClass(int64_t cost) {
  int32_t octave = 0;
  while (cost >= 32) {
    cost >>= 1;
    ++octave;
  }
  const int32_t found = octave * 16 + static_cast<int32_t>(cost);
  return found < kCostClasses ? found : kCostClasses - 1;
}

// Numbers of a tensor that are asked for in ascending order: read through UB, a chunk at a time.
template <typename Index>
class Ascending {
 public:
  __aicore__ inline void Init(TPipe* pipe, const GlobalTensor<Index>& numbers, int64_t count, int32_t chunk) {
    pipe_ = pipe;
    numbers_ = numbers;
    count_ = count;
    chunk_ = chunk;
    pipe->InitBuffer(buffer_, chunk * sizeof(Index));
  }

  __aicore__ inline int64_t At(int64_t index) {
    if (index < first_ || index >= first_ + held_) Load(index);
    return static_cast<int64_t>(buffer_.template Get<Index>().GetValue(index - first_));
  }

 private:
  __aicore__ inline void Load(int64_t index) {
    first_ = index;
    held_ = count_ - index < chunk_ ? count_ - index : chunk_;
    const auto read = pipe_->FetchEventID(HardEvent::S_MTE2);
    SetFlag<HardEvent::S_MTE2>(read);
    WaitFlag<HardEvent::S_MTE2>(read);
    DataCopyPad(buffer_.template Get<Index>(), numbers_[index],
                DataCopyExtParams{1, static_cast<uint32_t>(held_ * sizeof(Index)), 0, 0, 0},
                DataCopyPadExtParams<Index>{});
    const auto loaded = pipe_->FetchEventID(HardEvent::MTE2_S);
    SetFlag<HardEvent::MTE2_S>(loaded);
    WaitFlag<HardEvent::MTE2_S>(loaded);
  }

  TPipe* pipe_;
  TBuf<TPosition::VECIN> buffer_;
  GlobalTensor<Index> numbers_;
  int64_t count_ = 0, first_ = 0, held_ = 0;
  int32_t chunk_ = 0;
};

// A block of a sequence. Rows before the first and behind the last sequence make up two more, which are not real: there
// is nothing to see in them, but their results are written like others'.
struct Place {
  int64_t queryFirst, keyFirst;  // rows of the sequence
  int32_t queries, keys;         // their numbers
  int32_t sequence, block;
  bool real;
};

// `Policy` has Blocks(place), the number of blocks of a sequence, and Cost(place), that of one of them.
template <typename Index, typename Policy>
class Schedule {
 public:
  __aicore__ inline void Init(TPipe* pipe, const Policy& policy, const GlobalTensor<Index>& queryOffsets,
                              const GlobalTensor<Index>& keyOffsets, int32_t sequences, int64_t queryRows,
                              int64_t keyRows, int32_t members, int32_t cores, int32_t core, int32_t chunk) {
    policy_ = policy;
    sequences_ = sequences;
    queryRows_ = queryRows;
    keyRows_ = keyRows;
    members_ = members;
    cores_ = cores;
    core_ = core;
    queryOffsets_.Init(pipe, queryOffsets, int64_t{sequences} + 1, chunk);
    keyOffsets_.Init(pipe, keyOffsets, int64_t{sequences} + 1, chunk);
    Count();
    Begin();
  }

  // The next unit of this core; false where there is none.
  __aicore__ inline bool Next(Place& place, int32_t& member) {
    while (member_ >= end_) {
      if (!Advance()) return false;
      // Units of a class have numbers, in the order of the walk; a run of them is this core's.
      const int32_t found = CostClass(policy_.Cost(place_));
      member_ = first_[found] > 0 ? first_[found] : 0;
      end_ = first_[found] + own_[found] < members_ ? first_[found] + own_[found] : members_;
      first_[found] -= members_;
    }
    place = place_;
    member = member_++;
    return true;
  }

 private:
  __aicore__ inline void Count() {
    for (int32_t i = 0; i < kCostClasses; ++i) first_[i] = own_[i] = 0;
    Begin();
    while (Advance()) {
      const int64_t cost = policy_.Cost(place_);
      const int32_t found = CostClass(cost);
      own_[found] += members_;
      first_[found] += static_cast<int32_t>(cost);
    }
    for (int32_t i = 0; i < cores_; ++i) {
      order_[i] = i;
      loads_[i] = 0;
    }
    for (int32_t i = kCostClasses - 1; i >= 0; --i) {
      const int32_t units = own_[i];
      if (units > 0) Deal(units, first_[i] / (units / members_), first_[i], own_[i]);
    }
  }

  // Units of one cost, each to the core with the least load. Cores are kept in the order of their loads, and those that
  // have got a unit line up behind, in that order again: so the next one is always the first of one of two queues.
  __aicore__ inline void Deal(int32_t units, int32_t cost, int32_t& first, int32_t& own) {
    first = own = 0;
    const int64_t spread = loads_[order_[cores_ - 1]] - loads_[order_[0]];
    const int64_t even = units / cores_ - spread / cost - 1;  // units that each core gets, whatever the others have
    if (even > 0) {
      for (int32_t i = 0; i < cores_; ++i) loads_[i] += even * cost;
      own += static_cast<int32_t>(even);
      first += static_cast<int32_t>(even) * core_;
      units -= static_cast<int32_t>(even) * cores_;
    }
    int32_t waiting = 0, served = 0, queued = 0;  // heads of both queues, and the end of the second
    for (; units > 0; --units) {
      int32_t core;
      const bool again = served < queued && (waiting == cores_ || loads_[queue_[served]] < loads_[order_[waiting]]);
      if (again) {
        core = queue_[served++];
      } else {
        core = order_[waiting++];
      }
      loads_[core] += cost;
      if (queued == kQueue) {  // a ring that is long enough: no more than all cores are in it
        for (int32_t i = served; i < queued; ++i) queue_[i - served] = queue_[i];
        queued -= served;
        served = 0;
      }
      queue_[queued++] = core;
      if (core < core_) ++first;
      if (core == core_) ++own;
    }
    Merge(waiting, served, queued);
  }

  __aicore__ inline void Merge(int32_t waiting, int32_t served, int32_t queued) {
    int32_t merged[kMostCores];
    for (int32_t i = 0; i < cores_; ++i) {
      const bool second = served < queued && (waiting == cores_ || loads_[queue_[served]] < loads_[order_[waiting]]);
      merged[i] = second ? queue_[served++] : order_[waiting++];
    }
    for (int32_t i = 0; i < cores_; ++i) order_[i] = merged[i];
  }

  __aicore__ inline void Begin() {
    sequence_ = -2;
    blocks_ = 0;
    place_.block = 0;
    member_ = end_ = 0;
  }

  // To the next block of any sequence.
  __aicore__ inline bool Advance() {
    ++place_.block;
    while (place_.block >= blocks_) {
      if (++sequence_ > sequences_) return false;
      Enter();
    }
    return true;
  }

  __aicore__ inline void Enter() {
    const bool real = sequence_ >= 0 && sequence_ < sequences_;
    const int64_t begin = sequence_ < 0 ? 0 : queryOffsets_.At(sequence_);
    const int64_t end = sequence_ < sequences_ ? queryOffsets_.At(sequence_ + 1) : queryRows_;
    const int64_t keyBegin = sequence_ < 0 ? 0 : keyOffsets_.At(sequence_);
    const int64_t keyEnd = sequence_ < sequences_ ? keyOffsets_.At(sequence_ + 1) : keyRows_;
    place_ = {begin, keyBegin, static_cast<int32_t>(end - begin), static_cast<int32_t>(keyEnd - keyBegin), sequence_,
              0, real};
    blocks_ = policy_.Blocks(place_);
  }

  Policy policy_;
  Ascending<Index> queryOffsets_, keyOffsets_;
  int64_t queryRows_ = 0, keyRows_ = 0;
  int32_t sequences_ = 0, members_ = 0, cores_ = 1, core_ = 0;
  static constexpr int32_t kQueue = 4 * kMostCores;
  int32_t first_[kCostClasses], own_[kCostClasses];  // number of this core's first unit of a class, and how many it has
  int64_t loads_[kMostCores];
  int32_t order_[kMostCores], queue_[kQueue];
  Place place_;
  int32_t sequence_ = 0, blocks_ = 0, member_ = 0, end_ = 0;
};

}  // namespace turbogr
