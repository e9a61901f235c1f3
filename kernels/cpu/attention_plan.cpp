// Checks of the data of jagged attention, and its division into tasks.
#include "attention.h"

namespace turbogr {
namespace {

constexpr double kTasks = 64;    // at least about as many, if sequences are long enough to be split
constexpr int64_t kParts = 8;    // of a sequence, at most: each part of its keys has query gradients of its own
constexpr int64_t kLeast = 192;  // rows of a part

const char* check_offsets(const char* what, const int64_t* offsets, int64_t sequences, int64_t rows) {
  for (int64_t s = 0; s <= sequences; ++s) {
    const int64_t before = s > 0 ? offsets[s - 1] : 0;
    if (offsets[s] < before)
      return failure("jagged_attention: %s must ascend from at least one number, none below zero; entry %lld is %lld",
                     what, (long long)s, (long long)offsets[s]);
  }
  if (offsets[sequences] > rows)
    return failure("jagged_attention: %s end at row %lld, and there are %lld rows", what, (long long)offsets[sequences],
                   (long long)rows);
  return nullptr;
}

struct Range {
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
};

Range range(const int64_t* x, int64_t first, int64_t last) {
  Range r;
  for (int64_t i = first; i < last; ++i) {
    r.low = std::min(r.low, x[i]);
    r.high = std::max(r.high, x[i]);
  }
  return r;
}

const char* check_table(const char* side, Range r, int64_t size, const char* table) {
  if (size <= 1 || r.low > r.high || (r.low >= 0 && r.high < size)) return nullptr;
  return failure("index: jagged_attention: %s columns %lld to %lld exceed %s, which has %lld", side, (long long)r.low,
                 (long long)r.high, table, (long long)size);
}

const char* check_columns(const char* side, Range r) {
  if (r.low > r.high || (r.low >= 0 && r.high < kColumns)) return nullptr;
  return failure("jagged_attention: %s columns %lld to %lld are not within 0 and 2^29", side, (long long)r.low,
                 (long long)r.high);
}

const char* check_positions(const AttentionArguments& a, int64_t s) {
  const Range q = range(a.query_columns, a.query_offsets[s], a.query_offsets[s + 1]);
  const Range k = range(a.key_columns, a.key_offsets[s], a.key_offsets[s + 1]);
  const int64_t last = (a.position_entries - 1) / 2;
  if (q.low > q.high || k.low > k.high) return nullptr;
  if (q.high - k.low <= last && k.high - q.low <= last) return nullptr;
  return failure("index: jagged_attention: distances %lld to %lld exceed position_bias, which has -%lld to %lld",
                 (long long)(q.low - k.high), (long long)(q.high - k.low), (long long)last, (long long)last);
}

}  // namespace

const char* check_attention(const AttentionArguments& a) {
  if (const char* error = check_offsets("query_offsets", a.query_offsets, a.sequences, a.query_rows)) return error;
  if (const char* error = check_offsets("key_offsets", a.key_offsets, a.sequences, a.key_rows)) return error;
  const int64_t queries = a.query_offsets[a.sequences], keys = a.key_offsets[a.sequences];
  const Range q = range(a.query_columns, a.query_offsets[0], queries);
  const Range k = range(a.key_columns, a.key_offsets[0], keys);
  if (const char* error = check_table("query", q, a.mask_size[0], "pair_mask")) return error;
  if (const char* error = check_table("key", k, a.mask_size[1], "pair_mask")) return error;
  if (const char* error = check_table("query", q, a.bias_size[0], "bias")) return error;
  if (const char* error = check_table("key", k, a.bias_size[1], "bias")) return error;
  if (a.position_bias)
    for (int64_t s = 0; s < a.sequences; ++s)
      if (const char* error = check_positions(a, s)) return error;
  if (const char* error = check_columns("query", q)) return error;
  if (const char* error = check_columns("key", k)) return error;
  if (a.time_bias)
    for (int64_t e = 2; e < a.time_entries; ++e)
      if (a.time_bounds[e - 1] < a.time_bounds[e - 2]) return failure("jagged_attention: time_bounds must ascend");
  return nullptr;
}

std::vector<Task> plan_attention(const AttentionArguments& a, bool split_queries) {
  std::vector<Task> tasks;
  double total = 0;
  auto cost = [&](int64_t queries, int64_t keys) { return double(queries + 16) * double(keys + 16); };
  for (int64_t s = 0; s < a.sequences; ++s)
    total += cost(a.query_offsets[s + 1] - a.query_offsets[s], a.key_offsets[s + 1] - a.key_offsets[s]) * a.groups;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const Piece whole{s, a.query_offsets[s], a.query_offsets[s + 1], a.key_offsets[s], a.key_offsets[s + 1]};
    const int64_t queries = whole.last_query - whole.first_query, keys = whole.last_key - whole.first_key;
    if (queries == 0 || keys == 0) continue;
    const int64_t rows = split_queries ? queries : keys;
    int64_t parts = std::min<int64_t>(kParts, int64_t(cost(queries, keys) * kTasks / total));
    parts = std::max<int64_t>(1, std::min(parts, rows / kLeast));
    if (!split_queries && a.bias_grad) parts = 1;  // parts of one sequence may meet in a bias
    const int64_t size = up((rows + parts - 1) / parts, kQueries);
    for (int64_t first = 0; first < rows; first += size)
      for (int64_t g = 0; g < a.groups; ++g) {
        Piece part = whole;
        int64_t& start = split_queries ? part.first_query : part.first_key;
        int64_t& stop = split_queries ? part.last_query : part.last_key;
        stop = std::min(stop, start + first + size);
        start += first;
        tasks.push_back({part, g, cost(split_queries ? stop - start : queries, split_queries ? keys : stop - start)});
      }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.cost > y.cost; });
  return tasks;
}

}  // namespace turbogr
