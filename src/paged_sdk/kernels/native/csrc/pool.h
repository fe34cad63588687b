// The process's compute threads, shared by all models. A job is the use that one call makes of them.
//
// A job's task (task.h) runs on one thread at a time and issues work in phases of items, of which threads claim runs.
// No thread has a fixed share that others must wait for: a phase ends when all its items are done, whoever did them. A
// descheduled thread delays only the items that it has claimed, and threads yield between two claims rather than be
// preempted within one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "task.h"

namespace paged {

struct JobSlot;

// A thread that works on a job.
struct Runner {
  int thread;          // 0 ... num_threads - 1: selects its scratch memory
  bool ended = false;  // it ran the job's task to its end
};

inline std::coroutine_handle<> Task::promise_type::go_on() noexcept {
  if (parent) return parent;
  (*runner)->ended = true;
  return std::noop_coroutine();
}

// The work of a phase. Costs are in byte multiply-adds, of which a thread does some 500 per nanosecond.
struct Work {
  void (*run)(void* self, int64_t first, int64_t last, int thread);
  void* self;
  int64_t count;
  int64_t least;  // smallest claim, in items
  int64_t most;   // largest claim, in items
};

// Two to four microseconds: less work is not worth sharing, since sharing takes about half a microsecond.
constexpr int64_t kShareCost = int64_t{1} << 20;

class Job {
 public:
  Job(JobSlot* slot, int num_threads, Runner* runner) : num_threads(num_threads), slot_(slot), runner_(runner) {}
  Job(const Job&) = delete;

  // Calls body(first, last, thread) for runs of `count` items that cost about `cost` each, on all threads, and resumes
  // the task when all are done. `thread` is below num_threads and differs between concurrent calls.
  template <class Body>
  struct Phase {
    Job& job;
    int64_t count, cost;
    Body body;
    int64_t group = 1;  // items per claimable unit, so that a ticket's 24 bits can count the units

    bool await_ready() {
      if (job.slot_ != nullptr && count > 1 && count * cost > kShareCost) return false;
      if (count > 0) body(int64_t{0}, count, job.runner_->thread);
      return true;
    }
    void await_suspend(std::coroutine_handle<> rest) {
      constexpr int64_t kMostClaims = (1 << 24) - 1;
      group = (count + kMostClaims - 1) / kMostClaims;
      // At most a quarter of a millisecond, because a thread checks for competing programs only between claims.
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
  friend struct JobSlot;
  friend class Pool;
  friend void run_task(int num_threads, Task (*)(void*, Job&), void*);

  // Opens a phase. Afterwards another thread may already be running the rest of the task: the caller must not touch it.
  void publish(const Work& work, std::coroutine_handle<> rest);

  JobSlot* slot_;      // null: the calling thread works alone
  Runner* runner_;  // the thread that runs the task
  bool begun_ = false;
};

// Runs the task make(given, job) to its end on the calling thread and up to num_threads - 1 others.
void run_task(int num_threads, Task (*make)(void* given, Job& job), void* given);

// The same for a callable that returns the task.
template <class Make>
void run_job(int num_threads, Make make) {
  run_task(
      num_threads, [](void* given, Job& job) { return (*static_cast<Make*>(given))(job); }, &make);
}

template <class Body>
Task one_phase(Job& job, int64_t count, int64_t cost, const Body& body) {
  co_await job.phase(count, cost, [&body](int64_t first, int64_t last, int thread) { body(first, last, thread); });
}

// Runs a job of one phase.
template <class Body>
void parallel_for(int num_threads, int64_t count, int64_t cost, const Body& body) {
  run_job(num_threads, [&](Job& job) { return one_phase(job, count, cost, body); });
}

// Maximum threads of a job.
constexpr int kMostThreads = 255;

}  // namespace paged
