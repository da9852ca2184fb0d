// What stands around a matrix product in bfloat16 that turns coefficients into entries: rows of coefficients from
// quantised levels before it, and every head's entries to their places after it.

#include <algorithm>
#include <atomic>

#include "parallel.h"

namespace {

using precis::Bf16;
constexpr uint8_t kZero = 128, kEscape = 0;
constexpr int kRows = 32;  // of one piece of work

int used_columns(const uint8_t* own, int r) {
  constexpr uint64_t zeros = 0x8080808080808080u;
  uint64_t eight;
  while (r >= 8 && (std::memcpy(&eight, own + r - 8, 8), eight == zeros)) r -= 8;
  while (r > 0 && own[r - 1] == kZero) r--;
  return r;
}

int count_escapes(const uint8_t* own, int r) {
  int found = 0;
  for (int c = 0; c < r; c++) found += own[c] == kEscape;
  return found;
}

template <class Part>
void in_parts(int n, int size, int n_threads, const Part& part) {
  std::atomic<int> next{0};
  precis::on_threads(std::clamp((n + size - 1) / size, 1, n_threads), [&](int) {
    for (int start; (start = size * next++) < n;)
      for (int i = start; i < std::min(n, start + size); i++) part(i);
  });
}

}  // namespace

// Per row of symbols [n][r], the columns up to the last that is not 0, and how many escapes it has.
PRECIS_API void precis_scan(const uint8_t* symbols, int n, int r, int32_t* used, int32_t* n_escapes) {
  for (int row = 0; row < n; row++) {
    const uint8_t* own = symbols + static_cast<size_t>(row) * r;
    used[row] = used_columns(own, r);
    n_escapes[row] = count_escapes(own, used[row]);
  }
}

// The first k levels of the rows order[0..m): out [m][k] bfloat16. Row i's escapes are escapes[firsts[i]] to
// escapes[firsts[i + 1]]. Returns 0; 1 if an argument is wrong.
PRECIS_API int precis_rows(const uint8_t* symbols, const int32_t* escapes, const int64_t* firsts, int n, int r,
                           const int32_t* order, int m, int k, uint16_t* out, int n_threads) {
  if (n < 0 || m < 0 || k < 0 || k > r || n_threads <= 0) return 1;
  for (int i = 0; i < m; i++)
    if (order[i] < 0 || order[i] >= n) return 1;
  std::atomic<bool> fits{true};
  in_parts(m, kRows, n_threads, [&](int i) {
    const int row = order[i];
    const uint8_t* own = symbols + static_cast<size_t>(row) * r;
    uint16_t* to = out + static_cast<size_t>(i) * k;
    for (int c = 0; c < k; c++) {  // exact: a whole number of 8 bits
      const float value = static_cast<float>(static_cast<int>(own[c]) - kZero);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      to[c] = static_cast<uint16_t>(bits >> 16);
    }
    const int32_t *escaped = escapes + firsts[row], *stop = escapes + firsts[row + 1];
    for (int c = 0; c < k && escaped < stop; c++)
      if (own[c] == kEscape) precis::narrow(static_cast<float>(*escaped++), reinterpret_cast<Bf16*>(to)[c]);
    if (escaped < stop) fits = false;
  });
  return fits ? 0 : 1;
}

// Products [m][n_layers][2][n_kv_heads][dim], times the steps of their tokens, plus the mean: the entry of token i of m and
// head j = layer * n_kv_heads + head comes from row rows[i] and goes to places[j * n + i], unless that is below 0. Returns
// as above.
PRECIS_API int precis_place(const uint16_t* products, const float* mean, const float* steps, const int32_t* rows, int m,
                            int n, const int32_t* places, int64_t n_entries, int dim, int n_layers, int n_kv_heads,
                            uint16_t* keys, uint16_t* values, int n_threads) {
  if (m < 0 || n < m || dim <= 0 || n_layers <= 0 || n_kv_heads <= 0 || n_threads <= 0) return 1;
  const int n_heads = n_layers * n_kv_heads;
  for (int i = 0; i < m; i++)
    if (rows[i] < 0 || rows[i] >= m) return 1;
  for (int j = 0; j < n_heads; j++)
    for (int i = 0; i < m; i++)
      if (places[static_cast<size_t>(j) * n + i] >= n_entries) return 1;
  in_parts(2 * n_heads, 1, n_threads, [&](int index) {
    const int layer = index / (2 * n_kv_heads), kind = index / n_kv_heads % 2, head = index % n_kv_heads;
    const int32_t* to = places + static_cast<size_t>(layer * n_kv_heads + head) * n;
    const Bf16* from = reinterpret_cast<const Bf16*>(products) + static_cast<size_t>(index) * dim;
    Bf16* entries = reinterpret_cast<Bf16*>(kind ? values : keys);
    const float* centre = mean + static_cast<size_t>(index) * dim;
    for (int i = 0; i < m; i++) {
      if (to[i] < 0) continue;
      const Bf16* own = from + static_cast<size_t>(rows[i]) * 2 * n_heads * dim;
      Bf16* entry = entries + static_cast<size_t>(to[i]) * dim;
      const float step = steps[i];
      for (int d = 0; d < dim; d++) precis::narrow(precis::widened(own[d]) * step + centre[d], entry[d]);
    }
  });
  return 0;
}
