// Rows of a weight matrix times the activations of a few tokens. Weights are read where the model has them, once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace precis {

constexpr int kStrip = 32;  // rows of a weight matrix that are done together

// Activations [n][size] in float32, and weights in any dtype.
template <class Number>
class Activations {
 public:
  void reserve(int, int) {}

  void take(const float* from, int n, int size) {
    from_ = from;
    n_ = n;
    size_ = size;
  }

  // out[token * stride + row] of `n_rows` rows of weights [rows][size]; at most kStrip.
  void times(const Number* weights, int n_rows, float* out, int stride) const {
    for (int row = 0; row < n_rows; row += 4)
      for (int token = 0; token < n_; token += 4)
        block(weights + static_cast<size_t>(row) * size_, std::min(4, n_rows - row), token, std::min(4, n_ - token),
              out + row, stride);
  }

 private:
  void block(const Number* weights, int n_rows, int token, int n, float* out, int stride) const {
    if (n_rows == 4) {
      switch (n) {
        case 1: return sums<4, 1>(weights, token, out, stride);
        case 2: return sums<4, 2>(weights, token, out, stride);
        case 3: return sums<4, 3>(weights, token, out, stride);
        default: return sums<4, 4>(weights, token, out, stride);
      }
    }
    for (int r = 0; r < n_rows; r++)
      for (int t = 0; t < n; t++) sums<1, 1>(weights + static_cast<size_t>(r) * size_, token + t, out + r, stride);
  }

  template <int kRows, int kTokens>
  void sums(const Number* weights, int token, float* out, int stride) const {
    Vec sum[kRows][kTokens] = {};
    const float* x = from_ + static_cast<size_t>(token) * size_;
    int i = 0;
    for (; i + kLanes <= size_; i += kLanes) {
      Vec own[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; t++) own[t] = load(x + static_cast<size_t>(t) * size_ + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const Vec weight = load(weights + static_cast<size_t>(r) * size_ + i);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; t++) sum[r][t] += weight * own[t];
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTokens; t++) {
        float total = sum_of(sum[r][t]);
        for (int j = i; j < size_; j++)
          total += widened(weights[static_cast<size_t>(r) * size_ + j]) * x[static_cast<size_t>(t) * size_ + j];
        out[static_cast<size_t>(token + t) * stride + r] = total;
      }
  }

  const float* from_ = nullptr;
  int n_ = 0, size_ = 0;
};

#if defined(__AMX_BF16__)

// Bfloat16 weights: sixteen rows, as they are stored, times sixteen tokens at a time, whose activations are rounded.
template <>
class Activations<Bf16> {
 public:
  // For up to n tokens, and rows of up to so many weights.
  void reserve(int n, int size) {
    packed_ = Floats(static_cast<size_t>((n + 15) / 16) * 8 * padded(size));
    wide_.resize(static_cast<size_t>(kStrip) * size);
  }

  void take(const float* from, int n, int size) {
    from_.take(from, n, size);
    n_ = n;
    size_ = size;
    if (size % 32) return;
    const int blocks = (n + 15) / 16;
    for (int block = 0; block < blocks; block++)
      for (int i = 0; i < size; i += 32) {
        VecWord square[16];
        for (int t = 0; t < 16; t++) {
          const float* x = from + static_cast<size_t>(block * 16 + t) * size + i;
          square[t] = block * 16 + t < n ? (VecWord)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x))
                                         : VecWord{};
        }
        transpose(square);
        std::memcpy(&packed_[static_cast<size_t>(block) * 8 * size + i * 8], square, sizeof square);
      }
  }

  void times(const Bf16* weights, int n_rows, float* out, int stride) const {
    if (size_ % 32 || n_rows != kStrip) return plain(weights, n_rows, out, stride);
    alignas(64) float sums[4][256];
    for (int block = 0; block * 16 < n_; block += 2) {
      const float* left = &packed_[static_cast<size_t>(block) * 8 * size_];
      const float* right = left + static_cast<size_t>(8) * size_;
      const bool both = (block + 1) * 16 < n_;
      const char* ahead = reinterpret_cast<const char*>(weights + static_cast<size_t>(kStrip) * size_);
      _tile_zero(0);
      _tile_zero(1);
      if (both) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int i = 0; i < size_; i += 32) {
        if (block == 0)
          for (int line = 0; line < 2048; line += 64) __builtin_prefetch(ahead + static_cast<size_t>(i) * 64 + line, 0, 2);
        _tile_loadd(4, weights + i, size_ * 2);
        _tile_loadd(5, weights + static_cast<size_t>(16) * size_ + i, size_ * 2);
        _tile_loadd(6, left + i * 8, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (!both) continue;
        _tile_loadd(7, right + i * 8, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      put(sums[0], block * 16, out, stride);
      put(sums[1], block * 16, out + 16, stride);
      if (!both) continue;
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      put(sums[2], block * 16 + 16, out, stride);
      put(sums[3], block * 16 + 16, out + 16, stride);
    }
  }

 private:
  void put(const float* sums, int token, float* out, int stride) const {
    for (int t = 0; t < std::min(16, n_ - token); t++)
      for (int r = 0; r < 16; r++) out[static_cast<size_t>(token + t) * stride + r] = sums[r * 16 + t];
  }

  void plain(const Bf16* weights, int n_rows, float* out, int stride) const {
    for (size_t i = 0; i < static_cast<size_t>(n_rows) * size_; i++) wide_[i] = widened(weights[i]);
    from_.times(wide_.data(), n_rows, out, stride);
  }

  Activations<float> from_;
  Floats packed_;
  mutable std::vector<float> wide_;
  int n_ = 0, size_ = 0;
};

#endif

}  // namespace precis
