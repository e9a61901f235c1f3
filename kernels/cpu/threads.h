// Work shared among threads, memory that threads keep, and errors that reach Python.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace turbogr {

// The first exception of any thread; what is left of the work is skipped.
class Caught {
 public:
  template <typename Body>
  void run(Body body) noexcept {
    if (there_.load(std::memory_order_relaxed)) return;
    try {
      body();
    } catch (...) {
      if (!there_.exchange(true)) first_ = std::current_exception();
    }
  }

  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::atomic<bool> there_{false};
  std::exception_ptr first_;
};

// body(i) for i below count, each once, the next free thread taking the next i. What a body writes must depend on i
// alone: then results are the same for any number of threads. An exception must not leave a parallel region.
template <typename Body>
void parallel_for(int64_t count, int64_t threads, Body body) {
#if defined(__SANITIZE_THREAD__)
  // The sanitizer does not see how OpenMP's own threads wait for each other.
  if (threads > 1 && count > 1) {
    Caught caught;
    std::atomic<int64_t> next{0};
    std::vector<std::thread> team;
    for (int64_t t = 0; t < threads; ++t) {
      team.emplace_back([&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) caught.run([&] { body(i); });
      });
    }
    for (std::thread& one : team) one.join();
    caught.rethrow();
    return;
  }
#elif defined(_OPENMP)
  if (threads > 1 && count > 1) {
    Caught caught;
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t i = 0; i < count; ++i) caught.run([&] { body(i); });
    caught.rethrow();
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) body(i);
}

#if defined(TURBOGR_FAULTS)
bool allocation_fails();  // see faults.cpp
#else
inline bool allocation_fails() { return false; }
#endif

// Memory of one thread that outlives the call, so that the next call finds its pages in place.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(start_); }

  // Room for `bytes`, aligned to 64; what was there before is gone.
  void* room(size_t bytes) {
    if (bytes > size_) {
      std::free(start_);
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      start_ = allocation_fails() ? nullptr : std::aligned_alloc(4096, size_);
      if (start_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return start_;
  }

 private:
  void* start_ = nullptr;
  size_t size_ = 0;
};

// The calling thread's own T, made on first use. It lives on the heap: the address of a thread_local object itself
// would be computed anew wherever a member is used.
template <typename T>
T& own() {
  static thread_local const std::unique_ptr<T> mine(new T);
  return *mine;
}

// Text of an error for Python to raise; valid until the thread's next error.
__attribute__((format(printf, 1, 2))) inline const char* failure(const char* format, ...) {
  static thread_local char text[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

// The body of a function that Python calls: no exception leaves it, since nobody could catch it there.
template <typename Body>
const char* guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return failure("memory: there is not enough of it for a kernel's own tables");
  } catch (const std::length_error&) {
    return failure("memory: a kernel's own tables would exceed all memory");
  } catch (const std::exception& error) {
    return failure("internal: %s", error.what());
  } catch (...) {
    return failure("internal: a kernel failed");
  }
}

}  // namespace turbogr
