// Wraps what differs between operating systems and processors: starting threads, waiting, and clocks.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {

// Starts a detached thread that runs body(argument) with all signals blocked. `name`, up to 15 characters, is shown by
// debuggers and top. Returns false if the system cannot start a thread.
bool start_thread(const char* name, void (*body)(void*), void* argument);

// Yields the processor to another thread that waits for it.
void yield_processor();

// Nanoseconds of wall time, and of CPU time of the calling thread; the latter is 0 if the system does not report it.
inline int64_t wall_time() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}
int64_t processor_time();

// Registers `reset` to run in the child after a fork, where only the thread that called fork exists.
void at_fork_in_child(void (*reset)());

// Tells the processor that this is a spin loop.
inline void pause_processor() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// A clock that is cheap to read, and its approximate ticks per microsecond: the x86 TSC counts at 2 to 4 GHz.
#if defined(__x86_64__)
inline int64_t ticks() { return static_cast<int64_t>(__rdtsc()); }
constexpr int64_t kTicksPerMicrosecond = 2500;
#else
inline int64_t ticks() { return wall_time(); }
constexpr int64_t kTicksPerMicrosecond = 1000;
#endif

}  // namespace paged
