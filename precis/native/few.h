// Attention of a unit with matrix tiles (AMX) for up to four rows: one answer's query heads of a kv head, mostly.
//
// As in tiles.h, but tiles are four lanes wide: a vector of logits holds four keys, so that no lane is spent on rows that
// are not there, and a product over values takes as many cycles as there are rows.

#pragma once

#include "ragged.h"

#if defined(__AMX_BF16__)

#include "tiles.h"

namespace precis {

class FewBench {
 public:
  static constexpr int kRows = 4;

  explicit FewBench(int head_dim)
      : dim_(head_dim), query_(head_dim / 2 * kRows), weights_(kChunk * kRows), last_(16 * head_dim / 2),
        pairs_(kChunk * head_dim / 2), left_(kRows * kChunk / 2) {}

  void run(const Ragged& call, const Run& run, const Partials::Unit& unit, Partials& to) {
    static const Shapes shapes;
    _tile_loadconfig(&shapes);
    const size_t slot = unit.slot;
    float* out = &to.values[slot * dim_];
    std::fill_n(out, static_cast<size_t>(unit.n_rows) * dim_, 0.0f);
    std::fill_n(most_, kRows, kNothing);
    std::fill_n(total_, kRows, 0.0f);
    turn(call, unit.first_row, unit.n_rows);
    for (int start = unit.first; start < unit.stop; start += kChunk) {
      const int n = std::min(kChunk, unit.stop - start);
      const size_t at = static_cast<size_t>(start) * dim_;
      const Bf16 *keys = reinterpret_cast<const Bf16*>(run.keys) + at, *values = reinterpret_cast<const Bf16*>(run.values) + at;
      multiply(keys, n);
      pair_values(values, n, dim_, kChunk, pairs_.get());
      soften(call, run, start, n, unit, out);
      weigh(keys, n, unit.n_rows, out);
    }
    std::copy_n(most_, unit.n_rows, &to.most[slot]);
    std::copy_n(total_, unit.n_rows, &to.total[slot]);
  }

 private:
  static constexpr int kChunk = 128, kChains = 4;
  static constexpr float kLog2 = 1.44269504088896341f;

  // Tile 0: logits of sixteen keys; 1: queries; 2: sixteen keys, or pairs of values; 3 to 6: sums; 7: weights.
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {16, 16, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, kRows, kRows, kRows, kRows, kRows};
  };

  // The queries as pairs of dims: [D / 2][4].
  void turn(const Ragged& call, int first_row, int n_rows) {
    Bf16* to = reinterpret_cast<Bf16*>(query_.get());
    for (int d = 0; d < dim_; d++)
      for (int r = 0; r < kRows; r++)
        narrow(r < n_rows ? call.query[static_cast<size_t>(first_row + r) * dim_ + d] : 0.0f,
               to[(d / 2 * kRows + r) * 2 + d % 2]);
  }

  // Logits: [n][4].
  void multiply(const Bf16* keys, int n) {
    const int stride = dim_ * 2;
    for (int j = 0; j < n; j += 16) {
      const Bf16* block = keys + static_cast<size_t>(j) * dim_;
      if (n - j < 16) {  // what lies behind the last may not be read
        Bf16* padded = reinterpret_cast<Bf16*>(last_.get());
        std::memcpy(padded, block, static_cast<size_t>(n - j) * stride);
        std::memset(padded + (n - j) * dim_, 0, static_cast<size_t>(16 - n + j) * stride);
        block = padded;
      }
      _tile_zero(0);
      for (int d = 0; d < dim_; d += 32) {
        _tile_loadd(1, query_.get() + d / 2 * kRows, 16);
        _tile_loadd(2, block + d, stride);
        _tile_dpbf16ps(0, 2, 1);
      }
      _tile_stored(0, &weights_[j * kRows], 16);
    }
  }

  void soften(const Ragged& call, const Run& run, int start, int n, const Partials::Unit& unit, float* out) {
    const bool changes = run.causal || call.window > 0 || run.bias || call.softcap > 0;
    if (changes) change(call, run, start, n, unit);
    const int end = (n + 31) / 32 * 32 * kRows;
    std::fill_n(&weights_[n * kRows], end - n * kRows, kNothing);
    __m512 tops[kChains], sums[kChains];
    for (int i = 0; i < kChains; i++) tops[i] = _mm512_set1_ps(kNothing), sums[i] = _mm512_setzero_ps();
    for (int j = 0; j < end; j += 16 * kChains)
#pragma GCC unroll 4
      for (int i = 0; i < kChains; i++)
        if (j + 16 * i < end) tops[i] = _mm512_max_ps(_mm512_load_ps(&weights_[j + 16 * i]), tops[i]);
    for (int i = 1; i < kChains; i++) tops[0] = _mm512_max_ps(tops[0], tops[i]);
    const __m512 factor = _mm512_set1_ps(changes ? 1.0f : call.scaling);
    const __m512 before = _mm512_broadcast_f32x4(_mm_loadu_ps(most_));
    const __m512 above = _mm512_max_ps(_mm512_mul_ps(across<true>(tops[0]), factor), before);
    const __mmask16 nothing = _mm512_cmp_ps_mask(above, _mm512_set1_ps(kNothing), _CMP_EQ_OQ);
    const __m512 safe = _mm512_mask_blend_ps(nothing, above, _mm512_setzero_ps());
    const Vec scale = (Vec)factor * kLog2, top = (Vec)safe * kLog2;
    for (int j = 0; j < end; j += 16 * kChains)
#pragma GCC unroll 4
      for (int i = 0; i < kChains; i++) {
        if (j + 16 * i >= end) break;
        const Vec weight = power_of_two(load(&weights_[j + 16 * i]) * scale - top);
        sums[i] = _mm512_add_ps(sums[i], (__m512)weight);
        store(&weights_[j + 16 * i], weight);
      }
    for (int i = 1; i < kChains; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    const Vec sum = (Vec)across<false>(sums[0]), shrink = power_of_two((Vec)before * kLog2 - top);
    for (int r = 0; r < unit.n_rows; r++) {
      if (shrink[r] != 1.0f && total_[r] != 0.0f)
        for (int d = 0; d < dim_; d += kLanes) store(out + r * dim_ + d, load(out + r * dim_ + d) * shrink[r]);
      total_[r] = total_[r] * shrink[r] + sum[r];
      most_[r] = ((Vec)above)[r];
    }
  }

  // The largest of, or the sum over, four keys of each row, in every place of the row.
  template <bool kLargest>
  static __m512 across(__m512 x) {
    const __m512 halves = _mm512_shuffle_f32x4(x, x, 0x4e);
    x = kLargest ? _mm512_max_ps(x, halves) : _mm512_add_ps(x, halves);
    const __m512 quarters = _mm512_shuffle_f32x4(x, x, 0xb1);
    return kLargest ? _mm512_max_ps(x, quarters) : _mm512_add_ps(x, quarters);
  }

  // Scaling, soft-capping, bias, and what a row does not see.
  void change(const Ragged& call, const Run& run, int start, int n, const Partials::Unit& unit) {
    for (int j = 0; j < n; j++) {
      const int32_t position = run.positions ? reinterpret_cast<const int32_t*>(run.positions)[start + j] : 0;
      const float bias = run.bias ? reinterpret_cast<const float*>(run.bias)[start + j] : 0.0f;
      for (int r = 0; r < unit.n_rows; r++) {
        float& x = weights_[j * kRows + r];
        const int32_t own = call.row_positions[unit.first_row + r];
        x *= call.scaling;
        if (call.softcap > 0) x = call.softcap * std::tanh(x / call.softcap);
        x += bias;
        if ((run.causal && position > own) || (call.window > 0 && position <= own - call.window)) x = kNothing;
      }
    }
  }

  // Four rows of weights times the values, added to out; has the keys of the next chunk fetched meanwhile.
  void weigh(const Bf16* keys, int n, int n_rows, float* out) {
    const __m512i by_row = by_row_index();
    const int groups = (n + 31) / 32;
    for (int group = 0; group < groups; group++) {
      for (int i = 0; i < 32; i++) fetch(keys + static_cast<size_t>(kChunk + group * 32 + i) * dim_, dim_);
      const float* from = &weights_[group * 32 * kRows];
      __m512i part[4];
      for (int i = 0; i < 4; i++) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(from + 32 * i + 16), _mm512_load_ps(from + 32 * i));
        part[i] = _mm512_permutexvar_epi16(by_row, (__m512i)both);  // eight keys of each row
      }
      const __m512i a = _mm512_shuffle_i32x4(part[0], part[1], 0x44), b = _mm512_shuffle_i32x4(part[0], part[1], 0xee);
      const __m512i c = _mm512_shuffle_i32x4(part[2], part[3], 0x44), d = _mm512_shuffle_i32x4(part[2], part[3], 0xee);
      __m512i* to = reinterpret_cast<__m512i*>(&left_[group * kRows * 16]);
      _mm512_store_si512(to, _mm512_shuffle_i32x4(a, c, 0x88));
      _mm512_store_si512(to + 1, _mm512_shuffle_i32x4(a, c, 0xdd));
      _mm512_store_si512(to + 2, _mm512_shuffle_i32x4(b, d, 0x88));
      _mm512_store_si512(to + 3, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
    alignas(64) float sums[4][kRows * 16];
    const Bf16* right = reinterpret_cast<const Bf16*>(pairs_.get());
    for (int d = 0; d < dim_; d += 64) {
      _tile_zero(3);
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      for (int group = 0; group < groups; group++) {
        const Bf16* from = right + static_cast<size_t>(group) * 32 * dim_ + 2 * d;
        _tile_loadd(7, &left_[group * kRows * 16], 64);
        _tile_loadd(2, from, dim_ * 4);
        _tile_dpbf16ps(3, 7, 2);
        _tile_loadd(2, from + 32, dim_ * 4);
        _tile_dpbf16ps(4, 7, 2);
        _tile_loadd(2, from + 64, dim_ * 4);
        _tile_dpbf16ps(5, 7, 2);
        _tile_loadd(2, from + 96, dim_ * 4);
        _tile_dpbf16ps(6, 7, 2);
      }
      _tile_stored(3, sums[0], 64);
      _tile_stored(4, sums[1], 64);
      _tile_stored(5, sums[2], 64);
      _tile_stored(6, sums[3], 64);
      add_pairs(sums[0], sums[1], n_rows, dim_, out + d);
      add_pairs(sums[2], sums[3], n_rows, dim_, out + d + 32);
    }
  }

  // Eight keys of four rows, row by row.
  static __m512i by_row_index() {
    alignas(64) uint16_t index[32];
    for (int r = 0; r < kRows; r++)
      for (int k = 0; k < 8; k++) index[r * 8 + k] = static_cast<uint16_t>(k * kRows + r);
    return _mm512_load_si512(index);
  }

  int dim_;
  float most_[kRows], total_[kRows];
  Floats query_, weights_, last_, pairs_, left_;
};

// For any number of rows. Inside of `Tiles`, whose shapes are set again where others were needed.
class AnyBench {
 public:
  static constexpr bool kScales = true;  // queries come as they are, so that they stay exact in bfloat16

  explicit AnyBench(int head_dim) : dim_(head_dim), many_(head_dim), few_(head_dim) {}

  int head_dim() const { return dim_; }

  static bool fits(int head_dim) { return head_dim % 64 == 0 && head_dim <= 512; }

  void run(const Ragged& call, const Run& run, const Partials::Unit& unit, Partials& to) {
    if (unit.n_rows > FewBench::kRows) return many_.run(call, run, unit, to);
    few_.run(call, run, unit, to);
    Tiles::shape();
  }

 private:
  int dim_;
  TileBench many_;
  FewBench few_;
};

}  // namespace precis

#endif

namespace precis {

// What a thread must set up before it works on such numbers.
template <class Number>
struct Setting {
  Setting() {}
};

#if defined(__AMX_BF16__)
template <>
struct Setting<Bf16> {
  Tiles tiles;
};
#endif

}  // namespace precis
