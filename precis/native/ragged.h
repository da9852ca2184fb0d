// Attention of query rows over runs of entries: of a head of a shared snapshot, or of one answer's own tail.
//
// A row reads any number of runs. Runs are cut into units that threads take one by one; each gives, for its rows, the
// largest logit, the sum of weights and the weighted values, and these are merged exactly, as one softmax. Keys lie as
// they are stored, row by row, and are turned into columns where they are used, once for all rows of a unit.
// Computed in float32, whatever the dtype of the entries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace precis {

// Columns of a table in Python: precis/attention/ragged.py.
struct Run {
  int64_t keys, values, positions, bias;  // addresses; of [length][D], [length][D], int32 or null, float32 or null
  int64_t length;
  int64_t first_row, n_rows;
  int64_t causal;  // whether some row may come before some entry
};

// Whether a run can be read by rows of which there are so many.
inline bool fits(const Run& run, int64_t n_rows, int64_t window) {
  return 0 <= run.length && run.length < (1 << 30) && 0 <= run.first_row && 0 <= run.n_rows && run.n_rows <= n_rows &&
         run.first_row <= n_rows - run.n_rows && (run.length == 0 || (run.keys && run.values)) &&
         (run.length == 0 || run.positions || (!run.causal && window <= 0));
}

struct Ragged {
  const float* query;  // [rows][padded D]
  const int32_t* row_positions;
  int n_rows, head_dim;
  float softcap;  // 0: none
  int window;     // 0: none
  float scaling;  // of logits
};

// Columns of a table in Python, one row per token and kv head: addresses in the tail, of a new entry.
struct Place {
  int64_t key, value, position;
};

// Rows are numbered [K][token][G].
struct Rows {
  int n_tokens, group;

  int head_of(int row) const { return row / (n_tokens * group) * group + row % group; }
  int token_of(int row) const { return row % (n_tokens * group) / group; }
  int at(int head, int token) const { return (head / group * n_tokens + token) * group + head % group; }
};

inline int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

class Partials {
 public:
  struct Unit {
    int run, first, stop, first_row, n_rows, slot;
  };

  // Cuts runs into units of about equal work, several per thread.
  void plan(const Run* runs, int n_runs, int width, int n_threads) {
    units.clear();
    int64_t work = 0;
    for (int i = 0; i < n_runs; i++) work += runs[i].length * tiles(runs[i].n_rows);
    const int64_t share = work / (12 * n_threads) + 1;
    int slots = 0;
    for (int i = 0; i < n_runs; i++) {
      const int n = static_cast<int>(runs[i].length);
      const int n_rows = static_cast<int>(runs[i].n_rows), each = n_rows ? (n_rows + tiles(n_rows) - 1) / tiles(n_rows) : 0;
      const int size = static_cast<int>(std::min<int64_t>(std::max(n, 1), (share + kChunk - 1) / kChunk * kChunk));
      for (int a = 0; a < n; a += size)
        for (int row = 0; row < n_rows; row += each) {
          const int own = std::min(each, n_rows - row);
          units.push_back({i, a, std::min(a + size, n), static_cast<int>(runs[i].first_row) + row, own, slots});
          slots += own;
        }
    }
    most.resize(slots);
    total.resize(slots);
    if (values.size() < static_cast<size_t>(slots) * width) values = Floats(static_cast<size_t>(slots) * width);
  }

  // Which slots each row has.
  void index(int n_rows) {
    starts.assign(n_rows + 1, 0);
    for (const Unit& unit : units)
      for (int r = 0; r < unit.n_rows; r++) starts[unit.first_row + r + 1]++;
    for (int r = 0; r < n_rows; r++) starts[r + 1] += starts[r];
    next.assign(starts.begin(), starts.end() - 1);
    slots.resize(most.size());
    for (const Unit& unit : units)
      for (int r = 0; r < unit.n_rows; r++) slots[next[unit.first_row + r]++] = unit.slot + r;
  }

  std::vector<Unit> units;
  std::vector<float> most, total;
  Floats values;
  std::vector<int> starts, next, slots;

  static constexpr int kChunk = 256, kTile = 96;  // entries at a time, and rows

 private:
  static int tiles(int64_t n_rows) { return static_cast<int>((n_rows + kTile - 1) / kTile); }
};

// One thread's place to work; allocates nothing later.
template <class Number>
class Bench {
 public:
  static constexpr bool kScales = false;  // queries come scaled

  explicit Bench(int head_dim)
      : dim_(head_dim), width_(padded(head_dim)), weights_(kTile * kChunk), columns_(2 * kLanes * width_),
        wide_(kChunk * width_) {}

  int head_dim() const { return dim_; }

  void run(const Ragged& call, const Run& run, const Partials::Unit& unit, Partials& to) {
    float* most = &to.most[unit.slot];
    float* total = &to.total[unit.slot];
    float* out = &to.values[static_cast<size_t>(unit.slot) * width_];
    std::fill_n(most, unit.n_rows, kNothing);
    std::fill_n(total, unit.n_rows, 0.0f);
    std::fill_n(out, static_cast<size_t>(unit.n_rows) * width_, 0.0f);
    for (int start = unit.first; start < unit.stop; start += kChunk) {
      const int n = std::min(kChunk, unit.stop - start);
      logits(call, run, unit, start, n);
      for (int r = 0; r < unit.n_rows; r++) soften(r, n, most[r], total[r], out + static_cast<size_t>(r) * width_);
      add_values(run, unit.n_rows, start, n, out);
    }
  }

 private:
  static constexpr int kChunk = Partials::kChunk, kTile = Partials::kTile;
#if defined(__AVX512F__)
  static constexpr int kKeyRows = 8, kValueRows = 4, kWide = 4;
#else
  static constexpr int kKeyRows = 4, kValueRows = 2, kWide = 4;
#endif

  // Two blocks of keys as columns: [2][D][lanes]; keys beyond n are zeros.
  void turn(const Number* keys, int n) {
    for (int block = 0; block < 2; block++) {
      float* to = &columns_[block * width_ * kLanes];
      const int have = std::min(kLanes, std::max(0, n - block * kLanes));
      if (have == 0) {
        std::fill_n(to, width_ * kLanes, 0.0f);
        continue;
      }
      const Number* from = keys + static_cast<size_t>(block) * kLanes * dim_;
      constexpr int kStep = kLanes * 4 / sizeof(Number);  // dims in a square of words
      int d = 0;
      for (; d + kStep <= dim_; d += kStep) {
        VecWord square[kLanes];
        for (int i = 0; i < have; i++) std::memcpy(&square[i], from + static_cast<size_t>(i) * dim_ + d, sizeof(VecWord));
        for (int i = have; i < kLanes; i++) square[i] = VecWord{};
        transpose(square);
        spread(square, to + d * kLanes, Number{});
      }
      for (; d < dim_; d++)
        for (int i = 0; i < kLanes; i++) to[d * kLanes + i] = i < have ? widened(from[static_cast<size_t>(i) * dim_ + d]) : 0;
    }
  }

  static void spread(const VecWord (&square)[kLanes], float* to, float) {
    std::memcpy(to, square, sizeof square);
  }

  static void spread(const VecWord (&square)[kLanes], float* to, Bf16) {
    for (int i = 0; i < kLanes; i++) {
      const VecWord even = square[i] << 16, odd = square[i] & 0xffff0000u;
      std::memcpy(to + 2 * i * kLanes, &even, sizeof even);
      std::memcpy(to + (2 * i + 1) * kLanes, &odd, sizeof odd);
    }
  }

  void logits(const Ragged& call, const Run& run, const Partials::Unit& unit, int start, int n) {
    const Number* keys = reinterpret_cast<const Number*>(run.keys) + static_cast<size_t>(start) * dim_;
    const bool masks = run.causal || call.window > 0;
    for (int j = 0; j < n; j += 2 * kLanes) {
      turn(keys + static_cast<size_t>(j) * dim_, n - j);
      for (int r = 0; r < unit.n_rows; r += kKeyRows)
        products(call.query + static_cast<size_t>(unit.first_row + r) * width_, std::min(kKeyRows, unit.n_rows - r),
                 &weights_[r * kChunk + j]);
      for (int block = j; block < std::min(n, j + 2 * kLanes); block += kLanes)
        finish(call, run, unit, start, block, n, masks);
      for (int block = (n + kLanes - 1) / kLanes * kLanes; block < j + 2 * kLanes; block += kLanes)
        for (int r = 0; r < unit.n_rows; r++) store(&weights_[r * kChunk + block], all(kNothing));
    }
  }

  void products(const float* query, int n_rows, float* to) {
    switch (n_rows) {
      case 1: return block<1>(query, to);
      case 2: return block<2>(query, to);
      case 3: return block<3>(query, to);
      case 4: return block<4>(query, to);
      case 5: return block<5>(query, to);
      case 6: return block<6>(query, to);
      case 7: return block<7>(query, to);
      default: return block<8>(query, to);
    }
  }

  template <int kRows>
  void block(const float* query, float* to) {
    logits_of<kRows>(query, width_, columns_.get(), &columns_[width_ * kLanes], dim_, to, kChunk);
  }

  // Soft-capping, bias, and what a row does not see.
  void finish(const Ragged& call, const Run& run, const Partials::Unit& unit, int start, int block, int n, bool masks) {
    VecInt lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const VecInt beyond = lane >= n - block;
    const bool partial = n - block < kLanes;
    if (!masks && !partial && call.softcap <= 0 && !run.bias) return;
    VecInt position{};
    Vec bias{};
    const size_t have = sizeof(float) * std::min(kLanes, n - block);
    if (masks) std::memcpy(&position, reinterpret_cast<const int32_t*>(run.positions) + start + block, have);
    if (run.bias) std::memcpy(&bias, reinterpret_cast<const float*>(run.bias) + start + block, have);
    for (int r = 0; r < unit.n_rows; r++) {
      float* at = &weights_[r * kChunk + block];
      Vec x = load(at);
      if (call.softcap > 0)
        for (int i = 0; i < kLanes; i++) x[i] = call.softcap * std::tanh(x[i] / call.softcap);
      x += bias;
      VecInt hidden = beyond;
      if (masks) {
        const int32_t own = call.row_positions[unit.first_row + r];
        if (run.causal) hidden |= position > own;
        if (call.window > 0) hidden |= position <= own - call.window;
      }
      store(at, hidden ? all(kNothing) : x);
    }
  }

  // Logits of a row to weights, relative to the largest so far; what was summed before is scaled down to it.
  void soften(int r, int n, float& most, float& total, float* out) {
    float* row = &weights_[r * kChunk];
    Vec top = all(kNothing);
    for (int j = 0; j < n; j += kLanes) top = at_least(top, load(row + j));
    const float above = std::max(most, largest_of(top));
    if (above == kNothing) {
      std::fill_n(row, padded(n), 0.0f);
      return;
    }
    Vec sum{};
    for (int j = 0; j < n; j += kLanes) {
      const Vec weight = exp_of(load(row + j) - above);
      sum += weight;
      store(row + j, weight);
    }
    const float before = most == kNothing ? 0.0f : std::exp(most - above);
    if (before != 1.0f && total != 0.0f)
      for (int d = 0; d < width_; d += kLanes) store(out + d, load(out + d) * before);
    total = total * before + sum_of(sum);
    most = above;
  }

  void add_values(const Run& run, int n_rows, int start, int n, float* out) {
    const Number* values = reinterpret_cast<const Number*>(run.values) + static_cast<size_t>(start) * dim_;
    if (dim_ == width_ && (n_rows <= kValueRows || sizeof(Number) == sizeof(float))) return weigh(values, n_rows, n, out);
    for (int j = 0; j < n; j++) {
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) store(&wide_[j * width_ + d], load(values + static_cast<size_t>(j) * dim_ + d));
      for (; d < dim_; d++) wide_[j * width_ + d] = widened(values[static_cast<size_t>(j) * dim_ + d]);
    }
    weigh(wide_.get(), n_rows, n, out);
  }

  template <class From>
  void weigh(const From* values, int n_rows, int n, float* out) {
    for (int r = 0; r < n_rows; r += kValueRows) {
      const float* weights = &weights_[r * kChunk];
      float* to = out + static_cast<size_t>(r) * width_;
      int d = 0;
      const int own = std::min(kValueRows, n_rows - r);
      for (; d + kWide * kLanes <= width_; d += kWide * kLanes) rows<kWide>(values + d, weights, own, n, to + d);
      for (; d < width_; d += kLanes) rows<1>(values + d, weights, own, n, to + d);
    }
  }

  template <int kVectors, class From>
  void rows(const From* values, const float* weights, int n_rows, int n, float* to) {
    switch (n_rows) {
      case 1: return add_weighted<kVectors, 1>(weights, kChunk, values, width_, 0, n, to);
      case 2: return add_weighted<kVectors, 2>(weights, kChunk, values, width_, 0, n, to);
      case 3: return add_weighted<kVectors, 3>(weights, kChunk, values, width_, 0, n, to);
      default: return add_weighted<kVectors, 4>(weights, kChunk, values, width_, 0, n, to);
    }
  }

  int dim_, width_;
  Floats weights_, columns_, wide_;
};

// As many places to work as there are threads, kept from call to call.
template <class Place>
std::vector<Place>& places_to_work(int n_threads, int head_dim) {
  static thread_local std::vector<Place> kept;
  if (!kept.empty() && kept[0].head_dim() != head_dim) kept.clear();
  while (static_cast<int>(kept.size()) < n_threads) kept.emplace_back(head_dim);
  return kept;
}

// A row's partial results as one softmax, with a value-less entry (gpt-oss) of this logit; kNothing: without.
inline void merged(const Partials& from, int row, int width, float sink, float* out) {
  float most = sink;
  for (int i = from.starts[row]; i < from.starts[row + 1]; i++) most = std::max(most, from.most[from.slots[i]]);
  std::fill_n(out, width, 0.0f);
  if (most == kNothing) return;
  float total = sink == kNothing ? 0.0f : std::exp(sink - most);
  for (int i = from.starts[row]; i < from.starts[row + 1]; i++) {
    const int slot = from.slots[i];
    if (from.most[slot] == kNothing) continue;
    const float share = std::exp(from.most[slot] - most);
    total += share * from.total[slot];
    const float* values = &from.values[static_cast<size_t>(slot) * width];
    for (int d = 0; d < width; d += kLanes) store(out + d, load(out + d) + share * load(values + d));
  }
  const float factor = 1.0f / std::max(total, 1e-30f);
  for (int d = 0; d < width; d += kLanes) store(out + d, load(out + d) * factor);
}

}  // namespace precis
