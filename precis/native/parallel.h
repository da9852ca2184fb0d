// What the kernels share: work on several threads, and bfloat16.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

// What Python calls. All else is hidden: files of several instruction levels may be loaded side by side, and must not
// share what goes by the same name in both.
#define PRECIS_API extern "C" __attribute__((visibility("default")))

namespace precis {

// Calls work(thread) on up to n_threads threads at once, this one among them; work throws nothing. With OpenMP these are
// torch's own threads, which would else go on looking for work, and take the cores, for a while after each operation.
template <class Work>
void on_threads(int n_threads, const Work& work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(n_threads)
  work(omp_get_thread_num());
#else
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(n_threads);
    for (int thread = 1; thread < n_threads; thread++) helpers.emplace_back(work, thread);
  } catch (const std::exception&) {
    // no memory or no more threads to be had: fewer do the same work
  }
  work(0);
  for (auto& helper : helpers) helper.join();
#endif
}

// Calls work(thread, n) on n <= n_threads threads that all run at the same time, so that they may wait for one another.
template <class Work>
void on_team(int n_threads, const Work& work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(n_threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#else
  work(0, 1);
#endif
}

// Where the threads of a team wait until all are there.
class Meeting {
 public:
  void wait(int n) {
    const int round = round_.load(std::memory_order_acquire);
    if (there_.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
      there_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turns = 0; round_.load(std::memory_order_acquire) == round; turns++)
      if (turns > 4000) std::this_thread::yield();
  }

 private:
  std::atomic<int> there_{0}, round_{0};
};

struct Bf16 {
  uint16_t bits;
};

inline float widened(float x) { return x; }

inline float widened(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// To the nearest, ties to even; x is finite.
inline void narrow(float x, Bf16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void narrow(float x, float& to) { to = x; }

}  // namespace precis
