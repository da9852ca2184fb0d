// RoPE in place, where it turns channel d with channel d + width / 2.

#include <algorithm>
#include <atomic>

#include "parallel.h"

namespace {

constexpr int64_t kRows = 512;  // of one piece of work

template <class T>
void turn(T* own, int half, const float* cos, const float* sin) {
  for (int d = 0; d < half; d++) {
    const float one = precis::widened(own[d]), other = precis::widened(own[d + half]);
    precis::narrow(one * cos[d] - other * sin[d], own[d]);
    precis::narrow(other * cos[d + half] + one * sin[d + half], own[d + half]);
  }
}

}  // namespace

// keys [n][dim], float32 or, if `narrow`, bfloat16, at positions [n]; cos and sin [n_positions][width], width <= dim.
// Returns 0; 1 if an argument is wrong.
PRECIS_API int precis_rope(void* keys, int narrow, const int32_t* positions, int64_t n, int dim, const float* cos,
                           const float* sin, int64_t n_positions, int width, int n_threads) {
  if (n < 0 || width <= 0 || width % 2 || width > dim || n_threads <= 0) return 1;
  for (int64_t i = 0; i < n; i++)
    if (positions[i] < 0 || positions[i] >= n_positions) return 1;
  std::atomic<int64_t> next{0};
  precis::on_threads(static_cast<int>(std::clamp<int64_t>((n + kRows - 1) / kRows, 1, n_threads)), [&](int) {
    for (int64_t start; (start = kRows * next++) < n;)
      for (int64_t i = start; i < std::min(n, start + kRows); i++) {
        const float *c = cos + positions[i] * width, *s = sin + positions[i] * width;
        if (narrow)
          turn(static_cast<precis::Bf16*>(keys) + i * dim, width / 2, c, s);
        else
          turn(static_cast<float*>(keys) + i * dim, width / 2, c, s);
      }
  });
  return 0;
}
