// Holds what is kept between calls: scratch memory that grows, and the barrier of a thread team.
#pragma once

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi.h"

struct paged_workspace {
  uint8_t* data;
  size_t capacity;
  alignas(64) std::atomic<int> arrived;
  alignas(64) std::atomic<int> round;
  alignas(64) std::atomic<int64_t> next_item;  // of work that threads take as they come
};

namespace paged {

// At least `bytes` of scratch, 64-byte aligned; contents are lost when it grows. Null when there is no memory.
uint8_t* reserve(paged_workspace& workspace, size_t bytes);

namespace {

inline size_t line_aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

// The calling thread's place among those that share a call.
struct Team {
  paged_workspace& workspace;
  int index;
  int size;

  // Spins before it yields: the wait between two phases of a decode step is shorter than a futex wake-up.
  void barrier() const {
    if (size == 1) return;
    const int round = workspace.round.load(std::memory_order_relaxed);
    if (workspace.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      workspace.arrived.store(0, std::memory_order_relaxed);
      workspace.round.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; workspace.round.load(std::memory_order_acquire) == round; ++spins) {
      if (spins > 4000) {
        sched_yield();
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }

  // The share [first, last) of `count` items that is this thread's: contiguous, so that each streams its own memory.
  struct Range {
    int64_t first, last;
  };
  Range share(int64_t count) const { return {count * index / size, count * (index + 1) / size}; }
};

}  // namespace
}  // namespace paged
