// Attention of a unit with matrix tiles (AMX): bfloat16 entries of heads whose size is a multiple of 64.
//
// Sixteen keys, as they are stored, times sixteen query rows give sixteen vectors of logits, one per key, with a lane per
// row. Maxima and sums over keys are then sums of vectors. Weights are rounded to bfloat16 where values are weighed.

#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include "ragged.h"

namespace precis {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A thread's use of tiles.
class Tiles {
 public:
  Tiles() { shape(); }
  ~Tiles() { _tile_release(); }

  static void shape() {
    static const TileShapes shapes;
    _tile_loadconfig(&shapes);
  }
};

// 2^x for x <= 0, relative error below 5e-6; 0 for minus infinity.
inline Vec power_of_two(Vec x) {
  const __m512 bounded = _mm512_max_ps((__m512)x, _mm512_set1_ps(-200.0f));
  const __m512 whole = _mm512_roundscale_ps(bounded, 0);
  const Vec f = (Vec)_mm512_sub_ps(bounded, whole);
  Vec p = all(9.618129e-3f);
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return (Vec)_mm512_scalef_ps((__m512)p, whole);
}

// Has an entry fetched that will be needed, which may lie behind the last.
inline void fetch(const Bf16* entry, int dim) {
  for (int d = 0; d < dim; d += 32) __builtin_prefetch(entry + d, 0, 2);
}

// Values of two keys side by side: [n / 2][D][2], in thirty-twos whose dims lie as `add_pairs` undoes; zeros from n up to
// a multiple of 32. Has those of the next chunk fetched.
inline void pair_values(const Bf16* values, int n, int dim, int chunk, float* pairs) {
  Bf16* to = reinterpret_cast<Bf16*>(pairs);
  for (int j = 0; j < (n + 31) / 32 * 32; j += 2)
    for (int d = 0; d < dim; d += 32) {
      const Bf16* from = values + static_cast<size_t>(j) * dim + d;
      __builtin_prefetch(from + static_cast<size_t>(chunk) * dim, 0, 2);
      __builtin_prefetch(from + static_cast<size_t>(chunk + 1) * dim, 0, 2);
      const __m512i a = j < n ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
      const __m512i b = j + 1 < n ? _mm512_loadu_si512(from + dim) : _mm512_setzero_si512();
      _mm512_store_si512(to + (static_cast<size_t>(j) * dim + 2 * d), _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + (static_cast<size_t>(j) * dim + 2 * d) + 32, _mm512_unpackhi_epi16(a, b));
    }
}

// Adds sums of thirty-two dims, [n_rows][16] each, to rows of out.
inline void add_pairs(const float* first, const float* second, int n_rows, int dim, float* out) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int r = 0; r < n_rows; r++, out += dim) {
    const __m512 a = _mm512_load_ps(first + r * 16), b = _mm512_load_ps(second + r * 16);
    store(out, load(out) + (Vec)_mm512_permutex2var_ps(a, low, b));
    store(out + 16, load(out + 16) + (Vec)_mm512_permutex2var_ps(a, high, b));
  }
}

// Inside of `Tiles`. Tiles 0 to 3 are sums, 4 and 5 left sides, 6 and 7 right sides.
class TileBench {
 public:
  explicit TileBench(int head_dim)
      : dim_(head_dim), query_(16 * head_dim / 2), weights_(kChunk * 16), last_(16 * head_dim / 2),
        pairs_(kChunk * head_dim / 2), left_(16 * kChunk / 2) {}

  void run(const Ragged& call, const Run& run, const Partials::Unit& unit, Partials& to) {
    const size_t first = unit.slot;
    std::fill_n(&to.most[first], unit.n_rows, kNothing);
    std::fill_n(&to.total[first], unit.n_rows, 0.0f);
    std::fill_n(&to.values[first * dim_], static_cast<size_t>(unit.n_rows) * dim_, 0.0f);
    for (int start = unit.first; start < unit.stop; start += kChunk) {
      const int n = std::min(kChunk, unit.stop - start);
      const Bf16* values = reinterpret_cast<const Bf16*>(run.values) + static_cast<size_t>(start) * dim_;
      pair_values(values, n, dim_, kChunk, pairs_.get());
      for (int row = 0; row < unit.n_rows; row += 16) {
        const int n_rows = std::min(16, unit.n_rows - row);
        if (row > 0 || unit.n_rows > 16 || start == unit.first) turn(call, unit.first_row + row, n_rows);
        multiply(reinterpret_cast<const Bf16*>(run.keys) + static_cast<size_t>(start) * dim_, n);
        float* out = &to.values[(first + row) * dim_];
        soften(call, run, start, n, unit.first_row + row, n_rows, &to.most[first + row], &to.total[first + row], out);
        weigh(n, n_rows, out);
      }
    }
  }

 private:
  static constexpr int kChunk = 128, kChains = 8;
  static constexpr float kLog2 = 1.44269504088896341f;

  // Sixteen query rows as pairs of dims: [D / 2][16].
  void turn(const Ragged& call, int first_row, int n_rows) {
    for (int d = 0; d < dim_ / 2; d += 16) {
      VecWord square[16];
      for (int r = 0; r < 16; r++) {
        square[r] = VecWord{};
        if (r >= n_rows) continue;
        const float* from = call.query + static_cast<size_t>(first_row + r) * dim_ + 2 * d;
        square[r] = (VecWord)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
      }
      transpose(square);
      std::memcpy(query_.get() + d * 16, square, sizeof square);
    }
  }

  // Logits of sixteen rows: [n][16].
  void multiply(const Bf16* keys, int n) {
    const int stride = dim_ * 2;
    for (int j = 0; j < n; j += 64) {
      const Bf16* blocks[4];
      for (int i = 0; i < 4; i++) {
        const int have = n - j - 16 * i;
        blocks[i] = keys + static_cast<size_t>(j + 16 * i) * dim_;
        if (have >= 16) continue;  // what lies behind the last may not be read
        Bf16* padded = reinterpret_cast<Bf16*>(last_.get());
        if (have > 0) {
          std::memcpy(padded, blocks[i], static_cast<size_t>(have) * stride);
          std::memset(padded + have * dim_, 0, static_cast<size_t>(16 - have) * stride);
        }
        blocks[i] = padded;
      }
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int d = 0; d < dim_; d += 64) {
        _tile_loadd(6, query_.get() + d / 2 * 16, 64);
        _tile_loadd(7, query_.get() + (d / 2 + 16) * 16, 64);
        _tile_loadd(4, blocks[0] + d, stride);
        _tile_loadd(5, blocks[1] + d, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, blocks[2] + d, stride);
        _tile_loadd(5, blocks[3] + d, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
        _tile_loadd(4, blocks[0] + d + 32, stride);
        _tile_loadd(5, blocks[1] + d + 32, stride);
        _tile_dpbf16ps(0, 4, 7);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(4, blocks[2] + d + 32, stride);
        _tile_loadd(5, blocks[3] + d + 32, stride);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, &weights_[j * 16], 64);
      _tile_stored(1, &weights_[(j + 16) * 16], 64);
      _tile_stored(2, &weights_[(j + 32) * 16], 64);
      _tile_stored(3, &weights_[(j + 48) * 16], 64);
    }
  }

  // Logits to weights, relative to each row's largest so far; what was summed before is scaled down to it.
  void soften(const Ragged& call, const Run& run, int start, int n, int first_row, int n_rows, float* most, float* total,
              float* out) {
    const bool masks = run.causal || call.window > 0, changes = masks || run.bias || call.softcap > 0;
    VecInt own{};
    if (masks) std::memcpy(&own, call.row_positions + first_row, sizeof(int32_t) * n_rows);
    const int end = (n + 31) / 32 * 32;
    const Vec factor = all(call.scaling);
    if (changes) change(call, run, start, n, n_rows, own);
    for (int j = n; j < end; j++) store(&weights_[j * 16], all(kNothing));
    Vec tops[kChains], sums[kChains] = {};
    for (int i = 0; i < kChains; i++) tops[i] = all(kNothing);
    for (int j = 0; j < end; j += kChains)
#pragma GCC unroll 8
      for (int i = 0; i < kChains; i++) tops[i] = (Vec)_mm512_max_ps((__m512)load(&weights_[(j + i) * 16]), (__m512)tops[i]);
    Vec above = tops[0], before = all(kNothing), sum{};
    for (int i = 1; i < kChains; i++) above = at_least(above, tops[i]);
    std::memcpy(&before, most, sizeof(float) * n_rows);
    above = at_least(changes ? above : above * factor, before);
    const VecInt nothing = above == all(kNothing);
    const Vec safe = nothing ? Vec{} : above;
    const Vec scale = (changes ? all(1.0f) : factor) * kLog2, top = safe * kLog2;
    const Bf16* keys = reinterpret_cast<const Bf16*>(run.keys) + static_cast<size_t>(start + kChunk) * dim_;
    for (int j = 0; j < end; j += kChains)
#pragma GCC unroll 8
      for (int i = 0; i < kChains; i++) {
        fetch(keys + (j + i) * dim_, dim_);
        const Vec weight = power_of_two(load(&weights_[(j + i) * 16]) * scale - top);
        sums[i] += weight;
        store(&weights_[(j + i) * 16], weight);
      }
    for (int i = 0; i < kChains; i++) sum += sums[i];
    const Vec shrink = power_of_two(before * kLog2 - top);
    for (int r = 0; r < n_rows; r++) {
      if (shrink[r] != 1.0f && total[r] != 0.0f)
        for (int d = 0; d < dim_; d += kLanes) store(out + r * dim_ + d, load(out + r * dim_ + d) * shrink[r]);
      total[r] = total[r] * shrink[r] + sum[r];
      most[r] = above[r];
    }
  }

  // Scaling, soft-capping, bias, and what a row does not see.
  void change(const Ragged& call, const Run& run, int start, int n, int n_rows, VecInt own) {
    for (int j = 0; j < n; j++) {
      Vec x = load(&weights_[j * 16]) * call.scaling;
      if (call.softcap > 0)
        for (int i = 0; i < n_rows; i++) x[i] = call.softcap * std::tanh(x[i] / call.softcap);
      if (run.bias) x += reinterpret_cast<const float*>(run.bias)[start + j];
      const int32_t position = run.positions ? reinterpret_cast<const int32_t*>(run.positions)[start + j] : 0;
      VecInt hidden{};
      if (run.causal) hidden |= position > own;
      if (call.window > 0) hidden |= position <= own - call.window;
      store(&weights_[j * 16], hidden ? all(kNothing) : x);
    }
  }

  // Sixteen rows of weights times the values, added to out.
  void weigh(int n, int n_rows, float* out) {
    const int groups = (n + 31) / 32;
    for (int group = 0; group < groups; group++) {
      VecWord square[16];
      for (int i = 0; i < 16; i++) {
        VecWord even, odd;
        std::memcpy(&even, &weights_[(group * 32 + 2 * i) * 16], sizeof even);
        std::memcpy(&odd, &weights_[(group * 32 + 2 * i + 1) * 16], sizeof odd);
        square[i] = (even + 0x8000u) >> 16 | ((odd + 0x8000u) & 0xffff0000u);
      }
      transpose(square);
      std::memcpy(&left_[group * 256], square, sizeof square);
    }
    alignas(64) float sums[4][16 * 16];
    const Bf16* right = reinterpret_cast<const Bf16*>(pairs_.get());
    for (int d = 0; d < dim_; d += 64) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int group = 0; group < groups; group++) {
        const Bf16* from = right + static_cast<size_t>(group) * 32 * dim_ + 2 * d;
        _tile_loadd(4, &left_[group * 256], 64);
        _tile_loadd(6, from, dim_ * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, from + 32, dim_ * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, from + 64, dim_ * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, from + 96, dim_ * 4);
        _tile_dpbf16ps(3, 4, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      add_pairs(sums[0], sums[1], n_rows, dim_, out + d);
      add_pairs(sums[2], sums[3], n_rows, dim_, out + d + 32);
    }
  }

  int dim_;
  Floats query_, weights_, last_, pairs_, left_;
};

}  // namespace precis

#endif
