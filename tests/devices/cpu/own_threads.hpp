// Tasks on threads of the standard library, for the thread sanitizer: it sees them start and end, and nothing of how
// OpenMP's wait for each other, so that it tells of races where there are none.
#pragma once
#include <cstdint>
#include <thread>
#include <vector>

// In turns, so that neighbours are never one thread's, and without a counter, whose order would hide what they share.
inline void on_own_threads(int64_t count, void (*task)(const void*, int64_t), const void* job, int threads) {
  std::vector<std::thread> all;
  for (int n = 0; n < threads; ++n)
    all.emplace_back([=] {
      for (int64_t t = n; t < count; t += threads) task(job, t);
    });
  for (auto& one : all) one.join();
}
#define ATTN_THREADS on_own_threads
