// The threads of the process that compute, shared by all models: a job is one call's use of them.
//
// A job's task (task.h) runs on one thread at a time. It hands work out in phases of items; threads claim runs of items
// and never hold a processor waiting for each other's: a phase ends when its items are done, whoever did them. A thread
// that the system took off its processor holds up what it has claimed and nothing else, and it lets others have the
// processor between two claims rather than be stopped amid one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "task.h"

namespace paged {

struct Slot;

// A thread's part in a job.
struct Runner {
  int thread;          // 0 ... num_threads - 1: which scratch memory is its own
  bool ended = false;  // it has come to the end of the job's task
};

inline std::coroutine_handle<> Task::promise_type::go_on() noexcept {
  if (parent) return parent;
  (*runner)->ended = true;
  return std::noop_coroutine();
}

// The work of a phase. Costs are in units of a multiply-add of bytes, of which a thread does some 500 in a nanosecond.
struct Work {
  void (*run)(void* self, int64_t first, int64_t last, int thread);
  void* self;
  int64_t count;
  int64_t least;  // items that are worth a claim
  int64_t most;   // that a thread may hold at once
};

// Two to four microseconds: less work than that is not worth sharing, which takes about half of one.
constexpr int64_t kShareCost = int64_t{1} << 20;

class Job {
 public:
  Job(Slot* slot, int num_threads, Runner* runner) : num_threads(num_threads), slot_(slot), runner_(runner) {}
  Job(const Job&) = delete;

  // Calls body(first, last, thread) for runs of `count` items that cost about `cost` each, on all threads, and goes on
  // when all are done. `thread` is below num_threads and tells apart what runs at the same time.
  template <class Body>
  struct Phase {
    Job& job;
    int64_t count, cost;
    Body body;
    int64_t group = 1;  // items that are claimed as one, so that a claim's counter holds their number

    bool await_ready() {
      if (job.slot_ != nullptr && count > 1 && count * cost > kShareCost) return false;
      if (count > 0) body(int64_t{0}, count, job.runner_->thread);
      return true;
    }
    void await_suspend(std::coroutine_handle<> rest) {
      constexpr int64_t kMostClaims = (1 << 24) - 1;
      group = (count + kMostClaims - 1) / kMostClaims;
      // A quarter of a millisecond at most: so long a thread does not look who else wants the processor.
      const int64_t item = cost * group, least = kShareCost / item + 1, most = 64 * kShareCost / item + 1;
      job.publish({run, this, (count + group - 1) / group, least, most}, rest);
    }
    void await_resume() const {}

   private:
    static void run(void* self, int64_t first, int64_t last, int thread) {
      const Phase& phase = *static_cast<Phase*>(self);
      last *= phase.group;
      phase.body(first * phase.group, last < phase.count ? last : phase.count, thread);
    }
  };
  template <class Body>
  Phase<Body> phase(int64_t count, int64_t cost, Body body) {
    return {*this, count, cost > 0 ? cost : 1, static_cast<Body&&>(body)};
  }

  const int num_threads;

 private:
  friend struct Slot;
  friend class Pool;
  friend void run_task(int num_threads, Task (*)(void*, Job&), void*);

  // Opens a phase. From here on another thread may be running what follows it: nothing of the task may be touched.
  void publish(const Work& work, std::coroutine_handle<> rest);

  Slot* slot_;      // null: the calling thread is alone
  Runner* runner_;  // who runs the task
  bool begun_ = false;
};

// Runs make(given, job) to its end, on the calling thread and up to num_threads - 1 others.
void run_task(int num_threads, Task (*make)(void* given, Job& job), void* given);

// The same of a callable that returns the task.
template <class Make>
void run_job(int num_threads, Make make) {
  run_task(
      num_threads, [](void* given, Job& job) { return (*static_cast<Make*>(given))(job); }, &make);
}

template <class Body>
Task one_phase(Job& job, int64_t count, int64_t cost, const Body& body) {
  co_await job.phase(count, cost, [&body](int64_t first, int64_t last, int thread) { body(first, last, thread); });
}

// A job of one phase.
template <class Body>
void parallel_for(int num_threads, int64_t count, int64_t cost, const Body& body) {
  run_job(num_threads, [&](Job& job) { return one_phase(job, count, cost, body); });
}

// The most threads that a job can have.
constexpr int kMostThreads = 255;

}  // namespace paged
