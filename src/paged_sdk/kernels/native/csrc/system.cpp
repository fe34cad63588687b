#include "system.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#endif

namespace paged {

namespace {

struct Start {
  const char* name;
  void (*body)(void*);
  void* argument;
};

}  // namespace

#if defined(_WIN32)

namespace {

DWORD WINAPI run(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
  start.body(start.argument);
  return 0;
}

}  // namespace

bool start_thread(const char* name, void (*body)(void*), void* argument) {
  auto* start = new Start{name, body, argument};
  const HANDLE thread = CreateThread(nullptr, 0, run, start, 0, nullptr);
  if (thread != nullptr) {
    CloseHandle(thread);
  } else {
    delete start;
  }
  return thread != nullptr;
}

void yield_processor() { SwitchToThread(); }

int64_t processor_time() { return 0; }  // Windows counts it in steps of 16 ms

void at_fork_in_child(void (*)()) {}  // there is no fork

#else

namespace {

void* run(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
#if defined(__APPLE__)
  pthread_setname_np(start.name);
#else
  pthread_setname_np(pthread_self(), start.name);
#endif
  start.body(start.argument);
  return nullptr;
}

}  // namespace

bool start_thread(const char* name, void (*body)(void*), void* argument) {
  // Signals are left to the application's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto* start = new Start{name, body, argument};
  pthread_t thread;
  const bool started = pthread_create(&thread, nullptr, run, start) == 0;
  if (started) {
    pthread_detach(thread);
  } else {
    delete start;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void yield_processor() { sched_yield(); }

int64_t processor_time() {
  timespec time;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) != 0) return 0;
  return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

void at_fork_in_child(void (*reset)()) { pthread_atfork(nullptr, nullptr, reset); }

#endif

}  // namespace paged
