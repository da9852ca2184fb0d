// One layer's attention of a packed step: new entries go to their tails, and every row reads its runs.

#include <atomic>
#include <new>
#include <thread>
#include <type_traits>

#include "ragged.h"
#include "few.h"

namespace {

using namespace precis;

struct Step {
  const char *query, *key, *value;  // [heads][tokens][D], with strides in numbers
  int64_t query_head, query_token, key_head, key_token, value_head, value_token;
  char* out;  // [tokens][H][D]
  int n_tokens, n_kv_heads, group, head_dim;
};

template <class Number>
void append(const Step& step, const Place* places, const int32_t* positions) {
  const size_t size = sizeof(Number) * step.head_dim;
  for (int token = 0; token < step.n_tokens; token++)
    for (int head = 0; head < step.n_kv_heads; head++) {
      const Place& place = places[token * step.n_kv_heads + head];
      const auto* key = reinterpret_cast<const Number*>(step.key) + head * step.key_head + token * step.key_token;
      const auto* value = reinterpret_cast<const Number*>(step.value) + head * step.value_head + token * step.value_token;
      std::memcpy(reinterpret_cast<void*>(place.key), key, size);
      std::memcpy(reinterpret_cast<void*>(place.value), value, size);
      *reinterpret_cast<int32_t*>(place.position) = positions[token];
    }
}

template <class Number, class Worker>
void attend_with(const Step& step, const Run* runs, int n_runs, const int32_t* positions, Ragged call, const float* sinks,
                 int n_threads) {
  const Rows rows{step.n_tokens, step.group};
  const int width = padded(step.head_dim), n_rows = step.n_tokens * step.group * step.n_kv_heads;
  const float factor = Worker::kScales ? 1.0f : call.scaling;
  static thread_local Floats query;
  if (query.size() < static_cast<size_t>(n_rows) * width) query = Floats(static_cast<size_t>(n_rows) * width);
  static thread_local std::vector<int32_t> row_positions;
  row_positions.resize(n_rows + kLanes);
  for (int row = 0; row < n_rows; row++) {
    const auto* from = reinterpret_cast<const Number*>(step.query) + rows.head_of(row) * step.query_head +
                       rows.token_of(row) * step.query_token;
    float* to = &query[static_cast<size_t>(row) * width];
    for (int d = 0; d < step.head_dim; d++) to[d] = widened(from[d]) * factor;
    for (int d = step.head_dim; d < width; d++) to[d] = 0.0f;
    row_positions[row] = positions[rows.token_of(row)];
  }
  call.query = query.get();
  call.row_positions = row_positions.data();
  call.n_rows = n_rows;
  static thread_local Partials kept;
  Partials& partials = kept;
  partials.plan(runs, n_runs, width, n_threads);
  partials.index(n_rows);
  auto& places = places_to_work<Worker>(n_threads, step.head_dim);
  const int n_units = static_cast<int>(partials.units.size());
  std::atomic<int> next_unit{0}, done{0}, next_row{0};
  on_threads(n_threads, [&](int thread) {
    const Setting<Number> setting;
    for (int i; (i = next_unit++) < n_units; done++) {
      const auto& unit = partials.units[i];
      places[thread].run(call, runs[unit.run], unit, partials);
    }
    while (done < n_units) std::this_thread::yield();
    float found[1024];
    for (int row; (row = next_row++) < n_rows;) {
      const int head = rows.head_of(row);
      merged(partials, row, width, sinks ? sinks[head] : kNothing, found);
      auto* to = reinterpret_cast<Number*>(step.out) +
                 (static_cast<size_t>(rows.token_of(row)) * step.n_kv_heads * step.group + head) * step.head_dim;
      for (int d = 0; d < step.head_dim; d++) narrow(found[d], to[d]);
    }
  });
}

template <class Number>
void attend(const Step& step, const Run* runs, int n_runs, const int32_t* positions, const Ragged& call,
            const float* sinks, int n_threads) {
#if defined(__AMX_BF16__)
  if (std::is_same<Number, Bf16>::value && AnyBench::fits(step.head_dim))
    return attend_with<Number, AnyBench>(step, runs, n_runs, positions, call, sinks, n_threads);
#endif
  attend_with<Number, Bench<Number>>(step, runs, n_runs, positions, call, sinks, n_threads);
}

}  // namespace

// Strides are in numbers. runs: [n_runs][8] int64, places: [tokens * K][3] int64 or null, where nothing is appended;
// positions: [tokens]. Entries, query, key, value and out are of one dtype. Rows are numbered [K][token][G]. Returns 0;
// 1 if an argument is wrong; 2 if there is no memory.
PRECIS_API int precis_ragged_attention(
    const void* query, const void* key, const void* value, const int64_t* strides, void* out, int bfloat16,
    const int64_t* runs, int n_runs, const int64_t* places, const int32_t* positions, int n_tokens, int n_kv_heads,
    int group, int head_dim, float scaling, float softcap, int window, const float* sinks, int n_threads) {
  if (n_runs < 0 || n_tokens <= 0 || n_kv_heads <= 0 || group <= 0 || head_dim <= 0 || head_dim > 1024 - kLanes ||
      n_threads <= 0)
    return 1;
  const auto* table = reinterpret_cast<const Run*>(runs);
  const int64_t n_rows = static_cast<int64_t>(n_tokens) * n_kv_heads * group;
  for (int i = 0; i < n_runs; i++)
    if (!fits(table[i], n_rows, window)) return 1;
  const Step step{static_cast<const char*>(query), static_cast<const char*>(key), static_cast<const char*>(value),
                  strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], static_cast<char*>(out),
                  n_tokens, n_kv_heads, group, head_dim};
  const Ragged call{nullptr, nullptr, 0, head_dim, softcap, window, scaling};
  try {
    const auto* to = reinterpret_cast<const Place*>(places);
    if (bfloat16) {
      if (to) append<Bf16>(step, to, positions);
      attend<Bf16>(step, table, n_runs, positions, call, sinks, n_threads);
    } else {
      if (to) append<float>(step, to, positions);
      attend<float>(step, table, n_runs, positions, call, sinks, n_threads);
    }
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}
