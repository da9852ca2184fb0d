// Vectors as the compiler has them: every file is compiled once per instruction set, and has no intrinsics.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "parallel.h"

namespace precis {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecWord __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * kLanes)));

constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline Vec load(const float* from) {
  Vec found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline Vec load(const Bf16* from) {
  VecHalf bits;
  std::memcpy(&bits, from, sizeof bits);
  const VecWord wide = __builtin_convertvector(bits, VecWord) << 16;
  Vec found;
  std::memcpy(&found, &wide, sizeof found);
  return found;
}

inline void store(float* to, Vec what) { std::memcpy(to, &what, sizeof what); }

inline Vec all(float value) { return value - Vec{}; }

inline Vec at_least(Vec x, Vec y) { return x > y ? x : y; }

// e^x for x <= 0, relative error below 3e-7; 0 below -87.
inline Vec exp_of(Vec x) {
  const VecInt gone = x < -87.0f;
  x = gone ? all(-87.0f) : x;
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec n = (x * 1.44269504088896341f + magic) - magic;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const VecInt power = (__builtin_convertvector(n, VecInt) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  p = p * scale;
  return gone ? Vec{} : p;
}

inline float largest_of(Vec x) {
  float most = x[0];
  for (int i = 1; i < kLanes; i++) most = x[i] > most ? x[i] : most;
  return most;
}

inline float sum_of(Vec x) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += x[i];
  return sum;
}

// Logits of rows against two vectors of keys, which lie as columns [D][lanes].
template <int kRows>
inline void logits_of(const float* query, int stride, const float* first, const float* second, int dim, float* out,
                      int out_stride) {
  Vec left[kRows] = {}, right[kRows] = {};
  for (int d = 0; d < dim; d++) {
    const Vec a = load(first + d * kLanes), b = load(second + d * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      const float q = query[r * stride + d];
      left[r] += q * a;
      right[r] += q * b;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++) {
    store(out + r * out_stride, left[r]);
    store(out + r * out_stride + kLanes, right[r]);
  }
}

// Rows of weights times some vectors of the values from start to stop, added to out.
template <int kVectors, int kRows, class Number>
inline void add_weighted(const float* weights, int stride, const Number* values, int width, int start, int stop, float* out) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sum[r][v] = load(out + r * width + v * kLanes);
  for (int j = start; j < stop; j++) {
    Vec value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) value[v] = load(values + static_cast<size_t>(j) * width + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      const float weight = weights[r * stride + j];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sum[r][v] += weight * value[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(out + r * width + v * kLanes, sum[r][v]);
}

// Zeros at the start of a cache line: a vector that lies across two costs twice.
class Floats {
 public:
  Floats() = default;
  explicit Floats(size_t n) : size_(n), all_(static_cast<float*>(std::aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64))) {
    if (!all_) throw std::bad_alloc();
    std::fill_n(all_.get(), n, 0.0f);
  }
  float* get() const { return all_.get(); }
  size_t size() const { return size_; }
  float& operator[](size_t i) const { return all_.get()[i]; }

 private:
  size_t size_ = 0;
  struct Free {
    void operator()(float* what) const { std::free(what); }
  };
  std::unique_ptr<float[], Free> all_;
};

// Words in two vectors, taken in turns: of their first halves, and of their second halves.
#if defined(__AVX512F__)
#define PRECIS_FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define PRECIS_SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define PRECIS_FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define PRECIS_SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define PRECIS_FIRST_HALVES 0, 4, 1, 5
#define PRECIS_SECOND_HALVES 2, 6, 3, 7
#endif

// A square of words, its rows made columns: each round moves the highest bit of a row's number below its column's.
inline void transpose(VecWord (&rows)[kLanes]) {
  VecWord next[kLanes];
  for (int size = 1; size < kLanes; size *= 2) {
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], PRECIS_FIRST_HALVES);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], PRECIS_SECOND_HALVES);
    }
    for (int i = 0; i < kLanes; i++) rows[i] = next[i];
  }
}

}  // namespace precis
