// What contracts say of the entries of tensors, in one pass over each: kernels read and write at these places.
//
// Whatever is wrong is looked at again by kernels/contract/entries.py, which says what it is.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "threads.h"

namespace turbogr {
namespace {

enum Kind : int64_t { kRange = 1, kRangeBut, kRangeWithin, kAscending, kDistances };  // as entries.py counts them
constexpr int64_t kNumbers[] = {0, 5, 6, 7, 6, 7};  // of each kind, itself included
enum Asked : int64_t { kAny = 0, kOffsets = 1, kWhole = 2 };

// A number lies from 0 to `top` where neither it nor what is left up to `top` is negative: signs are all that is kept,
// and a vector does with three instructions.
template <typename T>
bool inside(const T* x, int64_t first, int64_t last, int64_t limit) {
  using Bits = std::make_unsigned_t<T>;
  const Bits top = Bits(std::min<int64_t>(limit - 1, std::numeric_limits<T>::max()));
  Bits signs = 0;
  for (int64_t i = first; i < last; ++i) signs |= Bits(x[i]) | (top - Bits(x[i]));
  return T(signs) >= 0;
}

template <typename T>
bool inside_but(const T* x, int64_t count, int64_t limit, int64_t but) {
  bool outside = false;
  for (int64_t i = 0; i < count; ++i) outside |= (uint64_t(int64_t(x[i])) >= uint64_t(limit)) & (x[i] != but);
  return !outside;
}

template <typename T>
bool in_range(const int64_t* f) {
  const T* x = (const T*)f[1];
  if (x == nullptr) return true;
  if (f[0] == kRangeBut) return inside_but(x, f[2], f[4], f[5]);
  if (f[0] == kRange) return inside(x, 0, f[2], f[4]);
  const auto* offsets = (const int64_t*)f[5];
  return inside(x, offsets[0], offsets[f[6] - 1], f[4]);
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

// Columns are in range before they are compared: no difference overflows. Where all of them are below the limit, so are
// their differences.
bool near(const int64_t* f) {
  const auto *query_offsets = (const int64_t*)f[3], *key_offsets = (const int64_t*)f[4];
  const int64_t count = f[5], limit = f[6];
  if (limit == std::numeric_limits<int64_t>::max()) return true;
  if (inside<int64_t>((const int64_t*)f[1], query_offsets[0], query_offsets[count - 1], limit) &&
      inside<int64_t>((const int64_t*)f[2], key_offsets[0], key_offsets[count - 1], limit))
    return true;
  for (int64_t s = 0; s + 1 < count; ++s) {
    const Ends q = ends((const int64_t*)f[1], query_offsets, s), k = ends((const int64_t*)f[2], key_offsets, s);
    if (q.low > q.high || k.low > k.high) continue;
    if (q.high - k.low >= limit || k.high - q.low >= limit) return false;
  }
  return true;
}

bool holds(const int64_t* f) {
  const bool small = f[3] == 4;
  switch (f[0]) {
    case kAscending:
      return small ? ascends<int32_t>(f) : ascends<int64_t>(f);
    case kDistances:
      return near(f);
    default:
      return small ? in_range<int32_t>(f) : in_range<int64_t>(f);
  }
}

}  // namespace

// `size` is in bytes.
extern "C" const char* turbogr_check(const int64_t* checks, int size) {
  const int64_t* end = checks + size / int(sizeof(int64_t));
  for (; checks < end; checks += kNumbers[checks[0]])
    if (!holds(checks)) return "refused";
  return nullptr;
}

}  // namespace turbogr
