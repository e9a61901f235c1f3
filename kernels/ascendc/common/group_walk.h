// Work on jagged groups, dealt to cores on the device: each core walks over the rows that are its own, in blocks.
//
// A group has own rows and other rows, and each own row is to meet all others of its group. What a row costs is known
// from offsets alone. Costs of all rows are laid end to end, and each core takes an equal part of them: rows that are
// neighbours, however long groups are. It needs no look at other cores' rows but for sums, which the vector unit forms
// for many groups at a time. Offsets are device tensors and never reach the host.
#pragma once

#include "kernel_operator.h"

namespace turbogr {

using namespace AscendC;

// The second pipe of the event waits for what the first one has been told so far.
template <HardEvent event>
__aicore__ inline void Await(TPipe* pipe) {
  const event_t id = static_cast<event_t>(pipe->FetchEventID(event));
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

// A block of own rows, and the other rows of its group.
struct Unit {
  int32_t group;
  int32_t first;
  int32_t count;
  int32_t otherFirst;
  int32_t otherCount;
};

constexpr int32_t kWalkGroups = 128;    // looked at together
constexpr int32_t kWalkOthersShift = 4; // a row costs one for so many others, as a binary logarithm,
constexpr float kWalkRowCost = 4.0f;    // and this on top

template <typename Index>
class GroupWalk {
 public:
  __aicore__ inline void Init(TPipe* pipe, int32_t groups) {
    pipe_ = pipe;
    groups_ = groups;
    pipe->InitBuffer(rawBuffer_, 4 * kWalkGroups * sizeof(Index));
    pipe->InitBuffer(numberBuffer_, kNumbers * kWalkGroups * sizeof(int32_t));
    for (int32_t i = 0; i < 4; ++i) {
      raw_[i] = rawBuffer_.template GetWithOffset<Index>(kWalkGroups, i * kWalkGroups * sizeof(Index));
    }
    for (int32_t i = 0; i < kNumbers; ++i) {
      number_[i] = numberBuffer_.template GetWithOffset<int32_t>(kWalkGroups, i * kWalkGroups * sizeof(int32_t));
    }
  }

  // From the first row of this core on, in blocks of `most` rows. Loading the others takes as long as `least` rows do,
  // so a group costs no less than that. Where rows are not `paired`, they meet no others.
  __aicore__ inline void Start(const GlobalTensor<Index>& own, const GlobalTensor<Index>& other, int32_t most,
                               int32_t least, bool paired) {
    own_ = own;
    other_ = other;
    most_ = most;
    least_ = least;
    paired_ = paired;
    int64_t total = 0;
    for (chunk_ = 0; chunk_ < groups_; chunk_ += kWalkGroups) {
      chunkCost_ = Load();
      total += chunkCost_;
    }
    const int64_t cores = GetBlockNum() * GetTaskRation();
    const int64_t core = GetBlockIdx();
    low_ = total * core / cores;
    high_ = total * (core + 1) / cores;
    chunk_ = low_ < high_ ? 0 : groups_;
    chunkEnd_ = 0;
    if (chunk_ < groups_) {
      EnterChunk(groups_ <= kWalkGroups);
    }
  }

  __aicore__ inline bool Next(Unit* unit) {
    while (chunk_ < groups_) {
      if (row_ < rowEnd_) {
        const int32_t left = rowEnd_ - row_;
        unit->group = chunk_ + index_;
        unit->first = number_[kOwnFirst].GetValue(index_) + row_;
        unit->count = left < most_ ? left : most_;
        unit->otherFirst = number_[kOtherFirst].GetValue(index_);
        unit->otherCount = paired_ ? number_[kOtherCount].GetValue(index_) : 0;
        row_ += unit->count;
        return true;
      }
      if (chunkEnd_ > high_ && begin_ >= high_) {
        chunk_ = groups_;
      } else if (++index_ < loaded_) {
        EnterGroup();
      } else if (chunkEnd_ >= high_) {
        chunk_ = groups_;
      } else if ((chunk_ += kWalkGroups) < groups_) {
        EnterChunk(false);
      }
    }
    return false;
  }

 private:
  enum { kOwnFirst, kOwnCount, kOtherFirst, kOtherCount, kCost, kScratch, kResult, kNumbers };

  // Groups of a chunk; they are not looked at where all rows are of cores before this one.
  __aicore__ inline void EnterChunk(bool loaded) {
    begin_ = chunkEnd_;
    chunkEnd_ = begin_ + (loaded ? chunkCost_ : Load());
    index_ = chunkEnd_ <= low_ ? loaded_ : -1;
    row_ = rowEnd_ = 0;
  }

  // Rows of a group whose middle lies within this core's part. The sum of a chunk is one of floats and may be rounded:
  // the core that reaches up to it takes all rows that are left.
  __aicore__ inline void EnterGroup() {
    const int32_t rows = number_[kOwnCount].GetValue(index_);
    const int64_t cost = number_[kCost].GetValue(index_);
    row_ = RowAt(low_, rows, cost);
    rowEnd_ = high_ >= chunkEnd_ ? rows : RowAt(high_, rows, cost);
    begin_ += rows > 0 ? rows * cost : 0;
  }

  // The first row of a group whose middle is not below a place in the line of costs.
  __aicore__ inline int32_t RowAt(int64_t place, int32_t rows, int64_t cost) const {
    const int64_t ahead = place - begin_ - cost / 2;
    const int64_t row = ahead <= 0 ? 0 : (ahead + cost - 1) / cost;
    return static_cast<int32_t>(row < rows ? row : rows);
  }

  // Offsets of a chunk of groups, and what each of their rows costs; the sum of that.
  __aicore__ inline int64_t Load() {
    loaded_ = groups_ - chunk_ < kWalkGroups ? groups_ - chunk_ : kWalkGroups;
    Await<HardEvent::V_MTE2>(pipe_);
    LoadOffsets(0, own_, chunk_);
    LoadOffsets(1, own_, chunk_ + 1);
    LoadOffsets(2, other_, chunk_);
    LoadOffsets(3, other_, chunk_ + 1);
    Await<HardEvent::MTE2_V>(pipe_);
    Await<HardEvent::S_V>(pipe_);  // numbers of the chunk before have been read
    Narrow(number_[kOwnFirst], raw_[0]);
    Narrow(number_[kOwnCount], raw_[1]);
    Narrow(number_[kOtherFirst], raw_[2]);
    Narrow(number_[kOtherCount], raw_[3]);
    Barrier();
    Sub(number_[kOwnCount], number_[kOwnCount], number_[kOwnFirst], loaded_);
    Sub(number_[kOtherCount], number_[kOtherCount], number_[kOtherFirst], loaded_);
    Barrier();
    return Weigh();
  }

  // cost = others · max(rows, least) / rows + what comes on top, rounded.
  __aicore__ inline int64_t Weigh() {
    const LocalTensor<int32_t> others = number_[kCost];
    const LocalTensor<float> cost = others.template ReinterpretCast<float>();
    const LocalTensor<float> rows = number_[kScratch].template ReinterpretCast<float>();
    const LocalTensor<float> result = number_[kResult].template ReinterpretCast<float>();
    Adds(others, number_[kOtherCount], (1 << kWalkOthersShift) - 1, loaded_);
    Cast(rows, number_[kOwnCount], RoundMode::CAST_RINT, loaded_);
    Barrier();
    ShiftRight(others, others, kWalkOthersShift, loaded_);
    Maxs(result, rows, static_cast<float>(least_), loaded_);
    Maxs(rows, rows, 1.0f, loaded_);
    Barrier();
    Cast(cost, others, RoundMode::CAST_RINT, loaded_);
    Div(result, result, rows, loaded_);
    Barrier();
    Mul(cost, cost, result, loaded_);
    Cast(rows, number_[kOwnCount], RoundMode::CAST_RINT, loaded_);
    Barrier();
    Muls(cost, cost, paired_ ? 1.0f : 0.0f, loaded_);
    Barrier();
    Adds(cost, cost, kWalkRowCost, loaded_);
    Barrier();
    Cast(number_[kResult], cost, RoundMode::CAST_RINT, loaded_);
    Barrier();
    Adds(number_[kCost], number_[kResult], 0, loaded_);
    Barrier();
    Cast(result, number_[kCost], RoundMode::CAST_RINT, loaded_);
    Barrier();
    Mul(rows, rows, result, loaded_);
    Barrier();
    ReduceSum(result, rows, rows, loaded_);
    Await<HardEvent::V_S>(pipe_);
    return static_cast<int64_t>(result.GetValue(0));
  }

  __aicore__ inline void LoadOffsets(int32_t place, const GlobalTensor<Index>& offsets, int32_t first) {
    const uint32_t bytes = loaded_ * sizeof(Index);
    DataCopyPad(raw_[place], offsets[first], DataCopyExtParams{1, bytes, 0, 0, 0},
                DataCopyPadExtParams<Index>{false, 0, 0, 0});
  }

  __aicore__ inline void Narrow(const LocalTensor<int32_t>& to, const LocalTensor<Index>& from) {
    if constexpr (sizeof(Index) == sizeof(int32_t)) {
      Adds(to, from, 0, loaded_);
    } else {
      Cast(to, from, RoundMode::CAST_NONE, loaded_);
    }
  }

  __aicore__ inline void Barrier() { PipeBarrier<PIPE_V>(); }

  TPipe* pipe_;
  GlobalTensor<Index> own_, other_;
  TBuf<TPosition::VECCALC> rawBuffer_, numberBuffer_;
  LocalTensor<Index> raw_[4];
  LocalTensor<int32_t> number_[kNumbers];
  int64_t low_, high_;                // this core's part of all costs
  int64_t begin_;                     // costs up to the next group
  int64_t chunkCost_, chunkEnd_;      // of the chunk, and up to its end
  int32_t groups_, most_, least_;
  int32_t chunk_, loaded_;            // first group of the chunk, and how many it has
  int32_t index_;                     // group in the chunk
  int32_t row_, rowEnd_;              // of this core, in the group
  bool paired_;
};

}  // namespace turbogr
