// The few things that differ between operating systems and processors: threads of our own, waiting, and time.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {

// Starts a detached thread that runs body(argument) with all signals blocked. `name` is what debuggers and top show, up
// to 15 letters. False: the system has no more threads.
bool start_thread(const char* name, void (*body)(void*), void* argument);

// Lets another thread have this processor, if one waits for it.
void yield_processor();

// Nanoseconds of time, and of processor time that the calling thread has had; 0 where the system does not say.
inline int64_t wall_time() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}
int64_t processor_time();

// Calls `reset` in the child of a fork, where only the thread that called fork is left.
void at_fork_in_child(void (*reset)());

// Says to the processor that this is a loop that waits.
inline void pause_processor() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// A clock that costs little to read, and about how many of its ticks a microsecond has: x86 counts at 2 to 4 GHz.
#if defined(__x86_64__)
inline int64_t ticks() { return static_cast<int64_t>(__rdtsc()); }
constexpr int64_t kTicksPerMicrosecond = 2500;
#else
inline int64_t ticks() { return wall_time(); }
constexpr int64_t kTicksPerMicrosecond = 1000;
#endif

}  // namespace paged
