// Rows gathered by number, and rows added up by number.
//
// Adding sorts entries (row, position) by row first, stably. Then each row of the result belongs to one thread, which
// sums in the order of positions: the same bits for any number of threads, and rows that nobody names become zero in
// the same pass.
#include "rowwise.h"

namespace turbogr {
namespace {

struct Entry {
  int64_t row, position;
};

// --- gather ---

struct GatherArguments {
  const char* x;
  const int64_t* rows;
  char* result;
  int64_t count, width, stride;  // width and stride of a row in bytes
  int64_t threads;
};

// Rows of a large table lie anywhere: their first lines are asked for in time, and the machine guesses the others.
template <typename Copy>
void gather(const GatherArguments& a, Copy copy) {
  constexpr int64_t ahead = 4, line = 64;
  const int64_t asked = std::min<int64_t>(a.width, 4 * line);
  for_rows(a.count, rows_per_chunk(a.width / 4), a.threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const char* next = a.x + a.rows[std::min(i + ahead, last - 1)] * a.stride;
      for (int64_t at = 0; at < asked; at += line) __builtin_prefetch(next + at);
      copy(a.result + i * a.width, a.x + a.rows[i] * a.stride);
    }
  });
}

template <int kBytes>
void gather_small(const GatherArguments& a) {
  gather(a, [](char* to, const char* from) { std::memcpy(to, from, kBytes); });
}

void gather_wide(const GatherArguments& a) {
  gather(a, [&](char* to, const char* from) {
    int64_t at = 0;
    for (; at + kVectorBytes <= a.width; at += kVectorBytes) store(to + at, load(from + at));
    if (at < a.width) std::memcpy(to + at, from + at, size_t(a.width - at));
  });
}

// --- scatter ---

// Entries by row, those of one row by position; `skip` is left out. The result lies in `entries`; `other` is room.
int64_t sorted(const int64_t* rows, int64_t count, int64_t skip, Entry* entries, Entry* other) {
  int64_t kept = 0, top = 0;
  bool ascending = true;
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] == skip) continue;
    ascending &= rows[i] >= top;
    top = std::max(top, rows[i]);
    entries[kept++] = {rows[i], i};
  }
  if (ascending) return kept;
  constexpr int digit = 11, values = 1 << digit;
  Entry *from = entries, *to = other;
  for (int shift = 0; shift < 63 && (top >> shift) > 0; shift += digit) {
    int64_t starts[values] = {};
    for (int64_t i = 0; i < kept; ++i) ++starts[(from[i].row >> shift) & (values - 1)];
    int64_t start = 0;
    for (int value = 0; value < values; ++value) {
      const int64_t here = starts[value];
      starts[value] = start;
      start += here;
    }
    for (int64_t i = 0; i < kept; ++i) to[starts[(from[i].row >> shift) & (values - 1)]++] = from[i];
    std::swap(from, to);
  }
  if (from != entries) std::memcpy(entries, from, size_t(kept) * sizeof(Entry));
  return kept;
}

struct SumArguments {
  const void* x;
  const Entry* entries;
  void* result;
  int64_t entry_count, rows, width, stride;  // width and stride of a row in numbers
  int64_t type, threads;
};

// Columns [first, last) of one row of the result. A row that is named once is itself, also where it is minus zero.
template <typename S>
void sum_row(const SumArguments& a, const Entry* entry, const Entry* end, S* to, int64_t first, int64_t last) {
  const S* x = (const S*)a.x;
  constexpr int kVectors = 8;
  int64_t at = first;
  for (; at + kVectors * kWidth <= last; at += kVectors * kWidth) {
    Lanes sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load_lanes(x + entry->position * a.stride + at + v * kWidth, Whole{});
    for (const Entry* e = entry + 1; e < end; ++e)
      for (int v = 0; v < kVectors; ++v) sums[v] += load_lanes(x + e->position * a.stride + at + v * kWidth, Whole{});
    for (int v = 0; v < kVectors; ++v) store_lanes(to + at + v * kWidth, sums[v], Whole{});
  }
  across(last - at, [&](int64_t more, auto cut) {
    Lanes sum = load_lanes(x + entry->position * a.stride + at + more, cut);
    for (const Entry* e = entry + 1; e < end; ++e) sum += load_lanes(x + e->position * a.stride + at + more, cut);
    store_lanes(to + at + more, sum, cut);
  });
}

// Rows [first, last) and columns [left, right) of the result. All bits zero is the number zero in every storage.
template <typename S>
void sum_block(const SumArguments& a, int64_t first, int64_t last, int64_t left, int64_t right) {
  const Entry* end = a.entries + a.entry_count;
  const Entry* entry = std::lower_bound(a.entries, end, first, [](const Entry& e, int64_t row) { return e.row < row; });
  S* result = (S*)a.result;
  const bool whole = right - left == a.width;
  for (int64_t row = first; row < last;) {
    const int64_t named = entry < end ? std::min(entry->row, last) : last;
    if (whole) {
      std::memset(result + row * a.width, 0, size_t((named - row) * a.width) * sizeof(S));
    } else {
      for (; row < named; ++row) std::memset(result + row * a.width + left, 0, size_t(right - left) * sizeof(S));
    }
    row = named;
    if (row == last) break;
    const Entry* next = entry;
    while (next < end && next->row == row) ++next;
    sum_row(a, entry, next, result + row * a.width, left, right);
    entry = next;
    ++row;
  }
}

// Any partition gives the same sums: each number of the result is one thread's.
template <typename S>
void sum_rows(const SumArguments& a, S*) {
  if (a.rows == 0 || a.width == 0) return;
  const int64_t work = (a.rows + a.entry_count) * a.width;
  const int64_t wanted = std::min(std::max<int64_t>(1, work / kChunk), 64 * a.threads);
  const int64_t rows = (a.rows + wanted - 1) / wanted, tall = (a.rows + rows - 1) / rows;
  // Few rows that are named often: threads share columns too.
  const int64_t most = std::max<int64_t>(1, a.width / (8 * kWidth));
  const int64_t wide = a.threads > 1 ? std::min(most, std::max<int64_t>(1, std::min(wanted, 4 * a.threads) / tall)) : 1;
  const int64_t columns = (a.width + wide - 1) / wide;
  parallel_for(tall * wide, a.threads, [&](int64_t task) {
    const int64_t first = task / wide * rows, left = task % wide * columns;
    if (left < a.width) sum_block<S>(a, first, std::min(a.rows, first + rows), left, std::min(a.width, left + columns));
  });
}

const char* sum_any(const SumArguments& a) {
  return for_storage(a.type, [&](auto* storage) { sum_rows(a, storage); });
}

struct ScatterArguments {
  const void* x;
  const int64_t* rows;
  void* result;
  int64_t count, limit, width, stride, skip;
  int64_t type, threads;
};

struct CoalesceArguments {
  const int64_t* rows;
  Entry* entries;
  Entry* other;
  int64_t* unique;
  int64_t* unique_count;
  int64_t count;
};

}  // namespace

extern "C" const char* turbogr_gather_rows(const GatherArguments* a) {
  return guarded([&]() -> const char* {
    switch (a->width) {
      case 0:
        break;
      case 2:
        gather_small<2>(*a);
        break;
      case 4:
        gather_small<4>(*a);
        break;
      case 8:
        gather_small<8>(*a);
        break;
      default:
        gather_wide(*a);
    }
    return nullptr;
  });
}

extern "C" const char* turbogr_scatter_rows(const ScatterArguments* a) {
  return guarded([&]() -> const char* {
    static thread_local Scratch scratch;
    Entry* entries = (Entry*)scratch.room(size_t(2 * a->count) * sizeof(Entry));
    const int64_t kept = sorted(a->rows, a->count, a->skip, entries, entries + a->count);
    return sum_any({a->x, entries, a->result, kept, a->limit, a->width, a->stride, a->type, a->threads});
  });
}

// Entries sorted by row, with the rank of each row in its stead, and the rows by rank.
extern "C" const char* turbogr_coalesce_rows(const CoalesceArguments* a) {
  return guarded([&]() -> const char* {
    const int64_t count = sorted(a->rows, a->count, -1, a->entries, a->other);
    int64_t ranks = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = a->entries[i].row;
      if (i == 0 || row != a->unique[ranks - 1]) a->unique[ranks++] = row;
      a->entries[i].row = ranks - 1;
    }
    *a->unique_count = ranks;
    return nullptr;
  });
}

extern "C" const char* turbogr_sum_rows(const SumArguments* a) {
  return guarded([&]() -> const char* { return sum_any(*a); });
}

}  // namespace turbogr
