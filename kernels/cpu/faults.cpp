// Allocations that fail when a test asks for it; only in a library that is built with TURBOGR_SANITIZE=faults.
#if defined(TURBOGR_FAULTS)
#include <atomic>
#include <cstdlib>
#include <new>

#include "threads.h"

namespace turbogr {
namespace {

std::atomic<int64_t> left{-1};  // allocations that succeed before one fails; below zero, all do

}  // namespace

bool allocation_fails() { return left.load() >= 0 && left.fetch_sub(1) == 0; }

extern "C" void turbogr_fail_after(int64_t allocations) { left = allocations; }

}  // namespace turbogr

// Seen by this library alone: its other symbols are not exported.
void* operator new(size_t bytes) {
  void* found = turbogr::allocation_fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void operator delete(void* x) noexcept { std::free(x); }
void operator delete[](void* x) noexcept { std::free(x); }
void operator delete(void* x, size_t) noexcept { std::free(x); }
void operator delete[](void* x, size_t) noexcept { std::free(x); }
#endif
