// Buffers of the unified buffer, and queues that hand them from one pipe to the next.
#pragma once

#include "sync.h"

namespace AscendC {

class TPipe;

namespace twin {

enum class Stage { kFree, kAllocated, kQueued, kDequeued };
constexpr const char* StageName(Stage stage) {
  constexpr const char* names[] = {"free", "allocated", "queued", "dequeued"};
  return names[static_cast<int>(stage)];
}

struct Buffer {
  uint32_t offset = 0, bytes = 0;
  Stage stage = Stage::kFree;
  Knowledge event;  // of the last hand-over
};

constexpr bool InUb(TPosition position) {
  return position == TPosition::VECIN || position == TPosition::VECOUT || position == TPosition::VECCALC;
}
constexpr int Producer(TPosition position) { return position == TPosition::VECIN ? PIPE_MTE2 : PIPE_V; }
constexpr int Consumer(TPosition position) { return position == TPosition::VECOUT ? PIPE_MTE3 : PIPE_V; }

}  // namespace twin

template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
  static_assert(twin::InUb(source) && twin::InUb(target), "the twin has queues of VECIN, VECOUT and VECCALC only");
  static_assert(depth >= 1, "in-place queues of depth 0 are not emulated");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    auto& core = Enter("AllocTensor");
    for (size_t tried = 0; tried < buffers_.size(); ++tried) {
      auto& buffer = buffers_[next_];
      next_ = (next_ + 1) % buffers_.size();  // in turn, as on the device: two buffers are two under way
      if (buffer.stage != twin::Stage::kFree) continue;
      buffer.stage = twin::Stage::kAllocated;
      core.clock.Learn(twin::Producer(source), buffer.event);
      core.ub.Poison(buffer.offset, buffer.bytes);
      return LocalTensor<T>(source, buffer.offset, buffer.bytes);
    }
    twin::Fail("queue-empty", "AllocTensor: all %zu buffers are in use, it would hang", buffers_.size());
  }

  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    auto& core = Enter("EnQue");
    auto& buffer = Find(tensor, twin::Stage::kAllocated, "EnQue");
    if (queued_.size() == depth) {
      twin::Fail("queue-depth", "%d tensors in a queue of depth %d", depth + 1, depth);
    }
    buffer.stage = twin::Stage::kQueued;
    buffer.event = core.clock.After(twin::Producer(source));
    queued_.push_back(&buffer);
    return true;
  }

  template <typename T>
  LocalTensor<T> DeQue() {
    auto& core = Enter("DeQue");
    if (queued_.empty()) twin::Fail("queue-order", "DeQue from an empty queue: it would hang");
    auto& buffer = *queued_.front();
    queued_.erase(queued_.begin());
    buffer.stage = twin::Stage::kDequeued;
    core.clock.Learn(twin::Consumer(target), buffer.event);
    return LocalTensor<T>(target, buffer.offset, buffer.bytes);
  }

  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    auto& core = Enter("FreeTensor");
    auto& buffer = Find(tensor, twin::Stage::kDequeued, "FreeTensor");
    buffer.stage = twin::Stage::kFree;
    buffer.event = core.clock.After(twin::Consumer(target));
  }

  ~TQueBind() {
    if (core_ == nullptr) return;
    for (const auto& buffer : buffers_) core_->leaks += buffer.stage != twin::Stage::kFree;
  }

 private:
  friend class TPipe;

  twin::Core& Enter(const char* name) {
    auto& core = twin::Me();
    core.instruction = name;
    if (buffers_.empty()) twin::Fail("queue-order", "%s of a queue without buffers: InitBuffer is missing", name);
    return core;
  }

  template <typename T>
  twin::Buffer& Find(const LocalTensor<T>& tensor, twin::Stage wanted, const char* name) {
    for (auto& buffer : buffers_) {
      if (buffer.offset != tensor.Offset()) continue;
      // FreeTensor right after AllocTensor is legal: the buffer was not needed.
      const bool unused = wanted == twin::Stage::kDequeued && buffer.stage == twin::Stage::kAllocated;
      if (buffer.stage != wanted && !unused) {
        twin::Fail("queue-order", "%s of a tensor that is %s", name, twin::StageName(buffer.stage));
      }
      return buffer;
    }
    twin::Fail("queue-order", "%s of a tensor that is not of this queue", name);
  }

  std::vector<twin::Buffer> buffers_;
  size_t next_ = 0;
  std::vector<twin::Buffer*> queued_;
  twin::Core* core_ = nullptr;
};

template <TPosition position, int32_t depth>
using TQue = TQueBind<position, position, depth>;

template <TPosition position = TPosition::VECCALC>
class TBuf {
  static_assert(twin::InUb(position), "the twin has buffers of VECIN, VECOUT and VECCALC only");

 public:
  template <typename T>
  LocalTensor<T> Get() {
    return Get<T>(bytes_ / sizeof(T));
  }
  template <typename T>
  LocalTensor<T> Get(uint32_t elements) {
    return GetWithOffset<T>(elements, 0);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t byteOffset) {
    if (bytes_ == 0) twin::Fail("queue-order", "Get of a TBuf without InitBuffer");
    if (byteOffset + elements * sizeof(T) > bytes_) {
      twin::Fail("out-of-bounds", "%u elements at byte %u of a TBuf of %u bytes", elements, byteOffset, bytes_);
    }
    return LocalTensor<T>(position, offset_ + byteOffset, elements * sizeof(T));
  }

 private:
  friend class TPipe;
  uint32_t offset_ = 0, bytes_ = 0;
};

class TPipe {
 public:
  TPipe() {
    auto& core = twin::Me();
    if (core.hasPipe) twin::Fail("two-pipes", "a core has one TPipe at a time");
    core.hasPipe = true;
    core.ubUsed = 0;
    count_ = 0;
  }
  ~TPipe() {
    if (twin::Machine::The().current) twin::Me().hasPipe = false;
  }
  TPipe(const TPipe&) = delete;

  template <TPosition source, TPosition target, int32_t depth>
  bool InitBuffer(TQueBind<source, target, depth>& queue, uint8_t count, uint32_t bytes) {
    if (!queue.buffers_.empty()) twin::Fail("queue-order", "InitBuffer of a queue that has buffers");
    if (count > 8) twin::Fail("queue-buffers", "a queue has at most 8 tensors at a time, not %d", count);
    for (int i = 0; i < count; ++i) {
      twin::Buffer buffer;
      buffer.offset = Take(bytes, &buffer.bytes);
      queue.buffers_.push_back(buffer);
    }
    queue.core_ = &twin::Me();
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
    buffer.offset_ = Take(bytes, &buffer.bytes_);
    return true;
  }

  TEventID FetchEventID(HardEvent event) {
    auto& core = twin::Me();
    for (int id = 0; id < twin::kEventIds; ++id) {
      if (!core.flags[static_cast<int>(event)][id] && !core.taken[static_cast<int>(event)][id]) return id;
    }
    twin::Fail("event-id", "no event id of %s is free", twin::PipesOf(event).name);
  }
  template <HardEvent event>
  TEventID AllocEventID() {
    const TEventID id = FetchEventID(event);
    twin::Me().taken[static_cast<int>(event)][id] = true;
    return id;
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    twin::Me().taken[static_cast<int>(event)][id] = false;
  }

 private:
  uint32_t Take(uint32_t bytes, uint32_t* rounded) {
    auto& core = twin::Me();
    core.instruction = "InitBuffer";
    if (bytes == 0) twin::Fail("ub-overflow", "InitBuffer of 0 bytes");
    if (++count_ > 64) twin::Fail("queue-buffers", "more than 64 buffers of one TPipe");
    *rounded = (bytes + twin::kBlock - 1) / twin::kBlock * twin::kBlock;
    const uint32_t offset = core.ubUsed;
    core.ubUsed += *rounded;
    if (core.ubUsed > twin::kUbBytes - twin::kUbReserve) {
      twin::Fail("ub-overflow", "buffers take %u bytes of UB, and there are %u beside the reserve", core.ubUsed,
                 twin::kUbBytes - twin::kUbReserve);
    }
    return offset;
  }

  int count_ = 0;
};


}  // namespace AscendC
