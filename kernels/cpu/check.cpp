// What contracts say of the entries of tensors, in one pass over each: kernels read and write at these places.
//
// Whatever is wrong is looked at again by kernels/contract/entries.py, which says what it is.
#include <algorithm>
#include <limits>

#include "threads.h"

namespace turbogr {
namespace {

constexpr int64_t kFields = 10;
enum Kind : int64_t { kRange = 1, kAscending = 2, kDistances = 3 };  // as entries.py counts them
enum Asked : int64_t { kAny = 0, kOffsets = 1, kWhole = 2 };

template <typename T>
bool in_range(const int64_t* f) {
  const T* x = (const T*)f[1];
  if (x == nullptr) return true;
  int64_t first = 0, last = f[2];
  const uint64_t limit = uint64_t(f[4]);
  if (const auto* offsets = (const int64_t*)f[7]) first = offsets[0], last = offsets[f[8] - 1];
  bool outside = false;
  if (f[5] != 0) {
    const T but = T(f[6]);
    for (int64_t i = first; i < last; ++i) outside |= (uint64_t(int64_t(x[i])) >= limit) & (x[i] != but);
  } else {
    for (int64_t i = first; i < last; ++i) outside |= uint64_t(int64_t(x[i])) >= limit;
  }
  return !outside;
}

template <typename T>
bool ascends(const int64_t* f) {
  const T* x = (const T*)f[1];
  const int64_t count = f[2], limit = f[4], asked = f[5];
  bool falls = false;
  for (int64_t i = 1; i < count; ++i) falls |= x[i] < x[i - 1];
  if (falls || asked == kAny) return !falls;
  if (count == 0 || x[0] < 0 || int64_t(x[count - 1]) > limit) return false;
  return asked == kOffsets || limit == 0 || (x[0] == 0 && int64_t(x[count - 1]) == limit);
}

struct Ends {
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
};

Ends ends(const int64_t* x, const int64_t* offsets, int64_t s) {
  Ends e;
  for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
    e.low = std::min(e.low, x[i]);
    e.high = std::max(e.high, x[i]);
  }
  return e;
}

// Columns are in range before they are compared: no difference overflows.
bool near(const int64_t* f) {
  const auto *query_offsets = (const int64_t*)f[3], *key_offsets = (const int64_t*)f[4];
  const int64_t limit = f[6];
  if (limit == std::numeric_limits<int64_t>::max()) return true;
  for (int64_t s = 0; s + 1 < f[5]; ++s) {
    const Ends q = ends((const int64_t*)f[1], query_offsets, s), k = ends((const int64_t*)f[2], key_offsets, s);
    if (q.low > q.high || k.low > k.high) continue;
    if (q.high - k.low >= limit || k.high - q.low >= limit) return false;
  }
  return true;
}

bool holds(const int64_t* f) {
  const bool small = f[3] == 4;
  switch (f[0]) {
    case kRange:
      return small ? in_range<int32_t>(f) : in_range<int64_t>(f);
    case kAscending:
      return small ? ascends<int32_t>(f) : ascends<int64_t>(f);
    case kDistances:
      return near(f);
  }
  return false;
}

}  // namespace

extern "C" const char* turbogr_check(const int64_t* checks, int count) {
  for (int i = 0; i < count; ++i)
    if (!holds(checks + i * kFields)) return "refused";
  return nullptr;
}

}  // namespace turbogr
