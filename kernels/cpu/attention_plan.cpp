// Division of jagged attention into tasks.
#include "attention.h"

namespace turbogr {
namespace {

constexpr double kTasks = 64;    // at least about as many, if sequences are long enough to be split
constexpr int64_t kParts = 8;    // of a sequence, at most: each part of its keys has query gradients of its own
constexpr int64_t kLeast = 192;  // rows of a part

}  // namespace

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
