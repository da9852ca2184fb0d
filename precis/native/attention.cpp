// Attention of new tokens over a dense cache, and the largest weight that any of them paid to each entry of a span, and
// the sum of the squares of all.
//
// One pass: a tile of rows of one query head against all keys it sees. Logits stay in the tile (tens of kilobytes per
// row block), are exponentiated there, multiplied with the values, and reduced to column maxima, so that no weight ever
// reaches main memory. Vectors are the compiler's: the file is compiled once per instruction set, and has no intrinsics.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace {

using namespace precis;

#if defined(__AVX512F__)
constexpr int kBlockRows = 12;  // 24 accumulators of 32 registers
#else
constexpr int kBlockRows = 6;  // 12 of 16
#endif

constexpr int kRows = 24;    // of a tile
constexpr int kBlock = 128;  // values that stay in the first-level cache

float sum_between(const float* from, int start, int stop) {
  Vec sum{};
  int j = start;
  for (; j + kLanes <= stop; j += kLanes) sum += load(from + j);
  float rest = 0;
  for (; j < stop; j++) rest += from[j];
  return sum_of(sum) + rest;
}

struct Call {
  const float *query, *row_weights, *sinks;
  float *out, *best;
  int n_heads, n_kv_heads, n_rows, n_keys, head_dim;
  float scaling, softcap;
  int window, start, stop, n_first, n_context;
};

// Keys of one kv head as [n / lanes][D][lanes] and values as [n][width], both padded with zeros.
struct Packed {
  Floats keys, values;
};

class Tile {
 public:
  Tile(const Call& call, int padded, int width)
      : call_(call), padded_(padded), width_(width), query_(kRows * call.head_dim),
        weights_(static_cast<size_t>(kRows) * padded), sums_(kRows * width) {}

  void run(const Packed& cache, int head, int first, float* best, float* squares) {
    const Call& c = call_;
    const int n = std::min(kRows, c.n_rows - first), position = c.n_keys - c.n_rows + first;
    const int from = lowest(position) / (2 * kLanes) * (2 * kLanes);  // of the whole tile
    const int to = position + n;
    std::fill_n(query_.get(), kRows * c.head_dim, 0.0f);
    for (int r = 0; r < n; r++) {
      const float* row = c.query + (static_cast<size_t>(head) * c.n_rows + first + r) * c.head_dim;
      for (int d = 0; d < c.head_dim; d++) query_[r * c.head_dim + d] = row[d] * c.scaling;
    }
    for (int j = from; j < to; j += 2 * kLanes)
      for (int r = 0; r < n; r += kBlockRows)
        {
        const float* keys = &cache.keys[static_cast<size_t>(j) * c.head_dim];
        logits_of<kBlockRows>(&query_[r * c.head_dim], c.head_dim, keys, keys + c.head_dim * kLanes, c.head_dim,
                              &weights_[static_cast<size_t>(r) * padded_ + j], padded_);
      }
    float totals[kRows];
    for (int r = 0; r < n; r++) totals[r] = softmax(r, position + r, from, to, head);
    for (int r = n; r < kRows; r++) std::fill_n(&weights_[static_cast<size_t>(r) * padded_ + from], to - from, 0.0f);
    std::fill_n(sums_.get(), kRows * width_, 0.0f);
    for (int j = from; j < to; j += kBlock)
      for (int r = 0; r < n; r += kBlockRows)
        for (int v = 0; v < width_; v += 2 * kLanes)
          add_weighted<2, kBlockRows>(&weights_[static_cast<size_t>(r) * padded_], padded_, cache.values.get() + v, width_, j,
                       std::min(to, j + kBlock), &sums_[r * width_ + v]);
    for (int r = 0; r < n; r++) {
      float* row = c.out + (static_cast<size_t>(head) * c.n_rows + first + r) * c.head_dim;
      for (int d = 0; d < c.head_dim; d++) row[d] = sums_[r * width_ + d] / totals[r];
      raise(r, first + r, from, position + r + 1, totals[r], best, squares);
    }
  }

 private:
  int lowest(int position) const { return call_.window > 0 ? std::max(0, position - call_.window + 1) : 0; }

  // Logits of a row to unnormalised weights, zero where it does not see; their sum, with the sink.
  float softmax(int r, int position, int from, int to, int head) {
    const Call& c = call_;
    float* row = &weights_[static_cast<size_t>(r) * padded_];
    if (c.softcap > 0)
      for (int j = from; j <= position; j++) row[j] = c.softcap * std::tanh(row[j] / c.softcap);
    const int end = (to + kLanes - 1) / kLanes * kLanes;
    std::fill(row + from, row + std::max(from, lowest(position)), kNothing);
    std::fill(row + position + 1, row + end, kNothing);
    Vec top = all(kNothing);
    for (int j = from; j < end; j += kLanes) {
      const Vec x = load(row + j);
      top = x > top ? x : top;
    }
    float most = c.sinks ? c.sinks[head] : kNothing;
    for (int i = 0; i < kLanes; i++) most = std::max(most, top[i]);
    Vec sum{};
    for (int j = from; j < end; j += kLanes) {
      const Vec weight = exp_of(load(row + j) - most);
      sum += weight;
      store(row + j, weight);
    }
    return sum_of(sum) + (c.sinks ? std::exp(c.sinks[head] - most) : 0.0f);
  }

  void raise(int r, int row_index, int from, int seen, float total, float* best, float* squares) {
    const Call& c = call_;
    const float* row = &weights_[static_cast<size_t>(r) * padded_];
    const int start = std::max(from, c.start), stop = std::min(seen, c.stop);
    if (c.start != 0 || c.stop != c.n_context) {  // a softmax over fewer entries
      total = sum_between(row, start, std::max(start, stop)) + sum_between(row, std::max(from, c.n_context), seen);
      const int first = std::min(c.n_first, c.start);
      if (from < first) total += sum_between(row, from, first);
    }
    const float factor = (c.row_weights ? c.row_weights[row_index] : 1.0f) / std::max(total, 1e-30f);
    float* to = best - c.start;
    int j = start;
    for (; j + kLanes <= stop; j += kLanes) {
      const Vec x = load(row + j) * factor, before = load(to + j);
      store(to + j, x > before ? x : before);
    }
    for (; j < stop; j++) to[j] = std::max(to[j], row[j] * factor);
    if (!squares) return;
    float* sums = squares - c.start;
    for (j = start; j + kLanes <= stop; j += kLanes) {
      const Vec x = load(row + j) * factor;
      store(sums + j, load(sums + j) + x * x);
    }
    for (; j < stop; j++) sums[j] += row[j] * factor * row[j] * factor;
  }

  const Call& call_;
  int padded_, width_;
  Floats query_, weights_, sums_;
};

void pack(const float* keys, const float* values, int n_keys, int head_dim, int width, const Packed& to) {
  for (int j = 0; j < n_keys; j++) {
    float* block = &to.keys[static_cast<size_t>(j / kLanes) * head_dim * kLanes + j % kLanes];
    for (int d = 0; d < head_dim; d++) block[d * kLanes] = keys[static_cast<size_t>(j) * head_dim + d];
    std::memcpy(&to.values[static_cast<size_t>(j) * width], values + static_cast<size_t>(j) * head_dim,
                sizeof(float) * head_dim);
  }
}

}  // namespace

// query [H][n][D], keys and values [K][m][D] (the last n keys belong to the queries), out [H][n][D], best
// and squares [H][stop - start]; softcap 0, window 0, row_weights, sinks and squares null: without. Returns 0; 1 if an
// argument is wrong; 2 if there is no memory.
PRECIS_API int precis_recording_attention(
    const float* query, const float* keys, const float* values, float* out, int n_heads, int n_kv_heads, int n_rows,
    int n_keys, int head_dim, float scaling, float softcap, int window, const float* sinks, float* best, int start, int stop,
    int n_first, int n_context, const float* row_weights, float* squares, int n_threads) {
  const bool fits = n_kv_heads > 0 && n_heads % n_kv_heads == 0 && 0 < n_rows && n_rows <= n_keys && head_dim > 0 &&
                    0 <= start && start <= stop && stop <= n_context && n_context <= n_keys && n_threads > 0;
  if (!fits) return 1;
  const Call call{query, row_weights, sinks, out, best, n_heads, n_kv_heads, n_rows, n_keys, head_dim,
                  scaling, softcap, window, start, stop, n_first, n_context};
  const auto rounded = [](int n) { return (n + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); };
  const int padded = rounded(n_keys), width = rounded(head_dim), span = stop - start;
  const int group = n_heads / n_kv_heads, tiles = (n_rows + kRows - 1) / kRows;
  std::vector<Packed> caches;
  std::vector<Tile> workplaces;
  std::vector<Floats> maxima, sums;
  try {
    for (int head = 0; head < n_kv_heads; head++)
      caches.push_back({Floats(static_cast<size_t>(padded) * head_dim), Floats(static_cast<size_t>(padded) * width)});
    for (int thread = 0; thread < n_threads; thread++) {
      workplaces.emplace_back(call, padded, width);
      maxima.emplace_back(static_cast<size_t>(n_heads) * span);
      if (squares) sums.emplace_back(static_cast<size_t>(n_heads) * span);
    }
  } catch (const std::bad_alloc&) {
    return 2;
  }
  std::atomic<int> next_pack{0}, packed{0}, next_tile{0};
  const auto work = [&](int thread) {
    for (int head; (head = next_pack++) < n_kv_heads; packed++)
      pack(keys + static_cast<size_t>(head) * n_keys * head_dim, values + static_cast<size_t>(head) * n_keys * head_dim,
           n_keys, head_dim, width, caches[head]);
    while (packed < n_kv_heads) std::this_thread::yield();
    for (int index; (index = next_tile++) < n_heads * tiles;) {
      const int head = index / tiles, at = tiles - 1 - index % tiles;  // the longest rows first
      const size_t row = static_cast<size_t>(head) * span;
      workplaces[thread].run(
          caches[head / group], head, at * kRows, &maxima[thread][row], squares ? &sums[thread][row] : nullptr);
    }
  };
  precis::on_threads(n_threads, work);
  for (const auto& found : maxima)
    for (size_t i = 0; i < static_cast<size_t>(n_heads) * span; i++) best[i] = std::max(best[i], found[i]);
  for (const auto& found : sums)
    for (size_t i = 0; i < static_cast<size_t>(n_heads) * span; i++) squares[i] += found[i];
  return 0;
}
