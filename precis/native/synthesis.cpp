// From quantised coefficients, most of which are 0, to the entries of every head: a sum of the rows of a matrix that
// the other coefficients choose. A head's part of the matrix fits into the second-level cache, its sums into registers.
// Vectors are the compiler's: the file is compiled once per instruction set, and has no intrinsics.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "parallel.h"

namespace {

constexpr int kVec = 16, kMost = 4;  // floats of a vector, vectors of a strip
constexpr int kRows = 256;           // of one piece of work
constexpr uint8_t kZero = 128, kEscape = 0;
typedef float Vec __attribute__((vector_size(4 * kVec)));

inline Vec load(const float* from) {
  Vec found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

struct Term {
  uint32_t axis;
  float value;
};

// The coefficients of n rows that are not 0, and where each row's begin. False if there are more escapes than told.
bool gather(const uint8_t* symbols, const int32_t* escapes, int64_t n_escapes, const float* steps, int n, int r,
            std::vector<Term>& terms, std::vector<size_t>& begins) {
  int64_t escaped = 0;
  begins.reserve(n + 1);
  for (int row = 0; row < n; row++) {
    begins.push_back(terms.size());
    const uint8_t* own = symbols + static_cast<size_t>(row) * r;
    for (int c = 0; c < r;) {
      uint64_t eight;
      if (c + 8 <= r && (std::memcpy(&eight, own + c, 8), eight == 0x8080808080808080u)) {
        c += 8;
        continue;
      }
      for (const int stop = std::min(r, c + 8); c < stop; c++) {
        if (own[c] == kZero) continue;
        float level = static_cast<float>(own[c]) - kZero;
        if (own[c] == kEscape) {
          if (escaped == n_escapes) return false;
          level = static_cast<float>(escapes[escaped++]);
        }
        terms.push_back({static_cast<uint32_t>(c), level * steps[row]});
      }
    }
  }
  begins.push_back(terms.size());
  return escaped == n_escapes;
}

template <int V>
void sum_rows(const float* matrix, int width, const float* mean, const Term* terms, const size_t* begins,
              const int32_t* places, int n_rows, float* out, int dim, int n_columns) {
  for (int row = 0; row < n_rows; row++) {
    if (places[row] < 0) continue;
    Vec sums[V];
    for (int v = 0; v < V; v++) sums[v] = load(mean + v * kVec);
    const Term* stop = terms + begins[row + 1];
    for (const Term* term = terms + begins[row]; term < stop; term++) {
      const float* from = matrix + static_cast<size_t>(term->axis) * width;
      for (int v = 0; v < V; v++) sums[v] += load(from + v * kVec) * term->value;
    }
    std::memcpy(out + static_cast<size_t>(places[row]) * dim, sums, sizeof(float) * n_columns);
  }
}

using Sum = void (*)(const float*, int, const float*, const Term*, const size_t*, const int32_t*, int, float*, int, int);
constexpr Sum kSums[kMost] = {sum_rows<1>, sum_rows<2>, sum_rows<3>, sum_rows<4>};

}  // namespace

// symbols [n][r], steps [n], matrix [n_layers][2][n_kv_heads][n_axes][width] and mean [n_layers][2][n_kv_heads][width],
// width the head dim rounded up to whole vectors. Row i of head j = layer * n_kv_heads + head is written to keys and values
// [n_entries][dim] at places[j][i], unless that is below 0. Returns 0; 1 if an argument is wrong; 2 if there is no memory.
PRECIS_API int precis_synthesize(const uint8_t* symbols, const int32_t* escapes, int64_t n_escapes, const float* steps,
                                 int n, int r, const float* matrix, const float* mean, int n_axes, int width, int dim,
                                 int n_layers, int n_kv_heads, const int32_t* places, int64_t n_entries, float* keys,
                                 float* values, int n_threads) {
  if (n < 0 || r < 0 || r > n_axes || dim <= 0 || width < dim || width % kVec || n_layers <= 0 || n_kv_heads <= 0 ||
      n_threads <= 0)
    return 1;
  const int n_heads = n_layers * n_kv_heads;
  for (size_t i = 0; i < static_cast<size_t>(n_heads) * n; i++)
    if (places[i] >= n_entries) return 1;
  std::vector<Term> terms;
  std::vector<size_t> begins;
  std::atomic<int> next{0};
  const auto work = [&](int) {
    for (int index; (index = next++) < 2 * n_heads;) {
      const int layer = index / (2 * n_kv_heads), kind = index / n_kv_heads % 2, head = index % n_kv_heads;
      const float* own = matrix + static_cast<size_t>(index) * n_axes * width;
      const int32_t* to = places + static_cast<size_t>(layer * n_kv_heads + head) * n;
      for (int first = 0; first < n; first += kRows) {  // terms stay in a cache from column to column
        const int n_rows = std::min(kRows, n - first);
        for (int column = 0; column < dim; column += kMost * kVec) {
          const int n_columns = std::min(kMost * kVec, dim - column);
          kSums[(n_columns + kVec - 1) / kVec - 1](own + column, width, mean + static_cast<size_t>(index) * width + column,
                                                   terms.data(), begins.data() + first, to + first, n_rows,
                                                   (kind ? values : keys) + column, dim, n_columns);
        }
      }
    }
  };
  try {
    if (!gather(symbols, escapes, n_escapes, steps, n, r, terms, begins)) return 1;
  } catch (const std::bad_alloc&) {
    return 2;
  }
  precis::on_threads(n_threads, work);
  return 0;
}
