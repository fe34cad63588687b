#include "pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "system.h"

namespace paged {

namespace {

// How long a thread spins before it sleeps. A futex sleep and wake-up take some 50 microseconds, 100 on a virtual
// machine; other threads' claims end sooner, and so does an engine's work between two steps. If other programs compete,
// a claim that is not done in this time belongs to a descheduled thread, and spinning for it would take a processor
// from someone.
constexpr int64_t kPatience = 500 * kTicksPerMicrosecond;
constexpr int64_t kPatienceBesideRivals = 300 * kTicksPerMicrosecond;

// How long a thread keeps a contended processor before it yields between two claims. Linux would preempt it, within a
// claim, after 1.4 milliseconds or more (EEVDF's base slice on two processors).
constexpr int64_t kTurn = 1300 * kTicksPerMicrosecond;

// How often a thread measures its share of CPU time.
constexpr int64_t kContentionInterval = 4000 * kTicksPerMicrosecond;

// Maximum concurrent jobs; further jobs run on their calling thread alone.
constexpr int kSlots = 32;

// The open phase, the job's number of threads (0: the job is over), and the next item to claim.
struct Ticket {
  uint64_t bits;

  static Ticket of(uint64_t phase, int threads) { return {phase << 32 | static_cast<uint64_t>(threads) << 24}; }
  uint64_t phase() const { return bits >> 32; }
  int threads() const { return static_cast<int>(bits >> 24 & 0xff); }
  int64_t next() const { return static_cast<int64_t>(bits & 0xffffff); }
};

// A futex on which threads sleep and are woken together. A thread registers as a sleeper before its last check of the
// condition, and whoever fulfils the condition checks for sleepers afterwards: one of the two sees the other.
struct WaitQueue {
  std::atomic<int> sleepers{0};
  std::atomic<int> wakes{0};

  template <class Waiting>
  void sleep_while(const Waiting& waiting) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const int seen = wakes.load(std::memory_order_seq_cst);
    if (waiting()) wakes.wait(seen, std::memory_order_acquire);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
  void wake_all() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    wakes.fetch_add(1, std::memory_order_seq_cst);
    wakes.notify_all();
  }
};

// Measures which share of the calling thread's compute time other programs take.
struct ContentionMonitor {
  bool disturbed = false;  // other programs took a considerable share
  int64_t turn_began = 0;  // ticks at the last yield

  // Time counts between begin and end; sleep falls outside.
  void begin(int64_t now) {
    ticks_ = turn_began = now;
    wall_ = wall_time();
    had_ = processor_time();
  }
  void end() {
    const int64_t had = processor_time();
    if (had == 0) return;
    const auto wall = static_cast<double>(wall_time() - wall_), away = wall - static_cast<double>(had - had_);
    constexpr double kMemory = 16e6;  // nanoseconds: a few scheduler slices
    const double fading = wall < kMemory ? 1.0 - wall / kMemory : 0.0;
    wall_sum_ = fading * wall_sum_ + wall;
    away_sum_ = fading * away_sum_ + away;
    disturbed = away_sum_ > 0.15 * wall_sum_ && away_sum_ > 3e5;
  }
  bool is_due(int64_t now) const { return now - ticks_ > kContentionInterval; }
  void look(int64_t now) {
    const int64_t turn = turn_began;
    end();
    begin(now);
    turn_began = turn;
  }

 private:
  int64_t ticks_ = 0, wall_ = 0, had_ = 0;
  double wall_sum_ = 0.0, away_sum_ = 0.0;
};

thread_local ContentionMonitor contention;

}  // namespace

// The state of a job that its threads share. Slots are never freed: a thread that was descheduled when the job ended
// finds the ticket changed when it resumes, and touches nothing else.
struct alignas(64) JobSlot {
  std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int64_t> done{0};
  // The work of even and of odd phases. A thread reads it before it claims. While a phase is open, only the other entry
  // is written, so if the claim succeeds, what was read belongs to the phase.
  struct alignas(64) PhaseWork {
    std::atomic<void (*)(void*, int64_t, int64_t, int)> run{nullptr};
    std::atomic<void*> self{nullptr};
    std::atomic<int64_t> count{0}, least{1}, most{1};
  };
  PhaseWork phases[2];
  std::coroutine_handle<> rest;  // read by the thread that finishes the phase
  Job* job = nullptr;            // read by the thread that finishes the phase
  std::atomic<int> helpers{0};
  std::atomic<int> disturbed{0};  // threads of the job that other programs disturb
  std::atomic<bool> taken{false};
  WaitQueue waiters;

  void open(const Work& work, std::coroutine_handle<> then, int threads) {
    const Ticket last{ticket.load(std::memory_order_relaxed)};
    PhaseWork& phase = phases[(last.phase() + 1) & 1];
    phase.run.store(work.run, std::memory_order_release);
    phase.self.store(work.self, std::memory_order_release);
    phase.count.store(work.count, std::memory_order_release);
    phase.least.store(work.least, std::memory_order_release);
    phase.most.store(work.most, std::memory_order_release);
    rest = then;
    done.store(0, std::memory_order_relaxed);
    turn(threads);
  }
  void turn(int threads) {
    const Ticket last{ticket.load(std::memory_order_relaxed)};
    ticket.store(Ticket::of(last.phase() + 1, threads).bits, std::memory_order_seq_cst);
    waiters.wake_all();
  }
  bool finish(Runner& me, const PhaseWork& phase, int64_t items);
  int64_t claim(Ticket seen, const PhaseWork& phase, int64_t left, int thread);
  void work(Runner& me, class Pool& pool);
};

// Tells the other threads of a job whether other programs disturb this thread, as long as it works on the job.
class JobContention {
 public:
  explicit JobContention(JobSlot& slot) : slot_(slot) {
    contention.begin(ticks());
    tell(contention.disturbed);
  }
  ~JobContention() {
    contention.end();
    tell(false);
  }

  // Whether to yield to other programs. If all threads of the job are disturbed alike, none yields: no thread would
  // continue the work meanwhile.
  bool must_yield(int64_t now) {
    if (contention.is_due(now)) {
      contention.look(now);
      tell(contention.disturbed);
    }
    return told_ && now - contention.turn_began > kTurn &&
           slot_.disturbed.load(std::memory_order_relaxed) <= slot_.helpers.load(std::memory_order_relaxed);
  }
  void yield() {
    yield_processor();
    contention.turn_began = ticks();
  }
  int64_t patience() const {
    return slot_.disturbed.load(std::memory_order_relaxed) > 0 ? kPatienceBesideRivals : kPatience;
  }
  void sleep(Ticket seen) {
    contention.end();
    slot_.waiters.sleep_while([&] { return slot_.ticket.load(std::memory_order_seq_cst) == seen.bits; });
    contention.begin(ticks());
    tell(contention.disturbed);
  }

 private:
  void tell(bool disturbed) {
    if (disturbed != told_) slot_.disturbed.fetch_add(disturbed ? 1 : -1, std::memory_order_relaxed);
    told_ = disturbed;
  }

  JobSlot& slot_;
  bool told_ = false;
};

class Pool {
 public:
  static Pool& instance();

  // Returns a slot for a job of num_threads threads, or null.
  JobSlot* open(int num_threads);
  void close(JobSlot* slot);
  // Wakes idle threads.
  void call() { idle_.wake_all(); }

  // Whether a helper should leave because other jobs have begun, whose calling threads need a processor each.
  bool leaves(int threads) {
    int busy = busy_.load(std::memory_order_relaxed);
    while (busy > threads)
      if (busy_.compare_exchange_weak(busy, busy - 1, std::memory_order_relaxed)) return true;
    return false;
  }
  void detach(JobSlot& slot, bool left) {
    slot.helpers.fetch_sub(1, std::memory_order_relaxed);
    if (!left) busy_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static void help(void* started);
  JobSlot* choose(int thread, int& wanted);
  JobSlot* attach(int thread);
  void start_helpers(int count);

  JobSlot slots_[kSlots];
  std::atomic<int> used_{0};  // slots below this have been used
  std::atomic<int> busy_{0};  // threads that work on jobs
  std::atomic<int> helpers_{0};
  std::mutex starting_;
  WaitQueue idle_;

  struct Started {
    Pool* pool;
    int thread;
  };
};

namespace {

std::atomic<Pool*> the_pool{nullptr};

// A forked child has none of the threads and starts a pool of its own. The handler is registered when the library is
// loaded: at the first job, another thread could fork during registration.
[[maybe_unused]] const bool registered = [] {
  at_fork_in_child([] { the_pool.store(nullptr, std::memory_order_release); });
  return true;
}();

}  // namespace

Pool& Pool::instance() {
  Pool* pool = the_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  // A pool is never destroyed, since its threads may outlive everything else.
  Pool* made = new Pool;
  if (!the_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) {
    delete made;
    return *pool;
  }
  return *made;
}

void Pool::start_helpers(int count) {
  if (helpers_.load(std::memory_order_acquire) >= count) return;
  const std::lock_guard<std::mutex> lock(starting_);
  for (int i = helpers_.load(std::memory_order_relaxed); i < count; ++i) {
    auto* started = new Started{this, i + 1};
    if (!start_thread("paged-compute", help, started)) {
      delete started;
      return;
    }
    helpers_.store(i + 1, std::memory_order_release);
  }
}

JobSlot* Pool::open(int num_threads) {
  busy_.fetch_add(1, std::memory_order_relaxed);
  if (num_threads <= 1) return nullptr;
  start_helpers(num_threads - 1);
  for (int i = 0; i < kSlots; ++i) {
    if (slots_[i].taken.exchange(true, std::memory_order_acquire)) continue;
    int used = used_.load(std::memory_order_relaxed);
    while (used <= i && !used_.compare_exchange_weak(used, i + 1, std::memory_order_release)) {
    }
    return &slots_[i];
  }
  return nullptr;
}

void Pool::close(JobSlot* slot) {
  if (slot != nullptr) slot->taken.store(false, std::memory_order_release);
  if (busy_.fetch_sub(1, std::memory_order_seq_cst) > 1) call();  // another job may want this one's threads
}

// Returns the open job with the fewest helpers, or null if all the processors it wants are taken.
JobSlot* Pool::choose(int thread, int& wanted) {
  JobSlot* best = nullptr;
  int fewest = 0;
  const int used = used_.load(std::memory_order_acquire);
  for (int i = 0; i < used; ++i) {
    const Ticket ticket{slots_[i].ticket.load(std::memory_order_seq_cst)};
    const int helpers = slots_[i].helpers.load(std::memory_order_relaxed);
    if (thread < ticket.threads() && (best == nullptr || helpers < fewest))
      best = &slots_[i], fewest = helpers, wanted = ticket.threads();
  }
  return best != nullptr && busy_.load(std::memory_order_seq_cst) < wanted ? best : nullptr;
}

JobSlot* Pool::attach(int thread) {
  int wanted = 0;
  JobSlot* const best = choose(thread, wanted);
  if (best == nullptr) return nullptr;
  for (int busy = busy_.load(std::memory_order_relaxed); busy < wanted;) {
    if (!busy_.compare_exchange_weak(busy, busy + 1, std::memory_order_relaxed)) continue;
    best->helpers.fetch_add(1, std::memory_order_relaxed);
    return best;
  }
  return nullptr;
}

void Pool::help(void* given) {
  const Started started = *static_cast<Started*>(given);
  delete static_cast<Started*>(given);
  Pool& pool = *started.pool;
  Runner me{started.thread};
  int64_t idle_since = ticks();
  for (;;) {
    if (JobSlot* slot = pool.attach(me.thread)) {
      slot->work(me, pool);
      idle_since = ticks();
    } else if (ticks() - idle_since < (contention.disturbed ? kPatienceBesideRivals : kPatience)) {
      pause_processor();
    } else {
      int wanted;
      pool.idle_.sleep_while([&] { return pool.choose(me.thread, wanted) == nullptr; });
      idle_since = ticks();
    }
  }
}

// Claims and runs some of the `left` items of the phase in `seen`. Returns how many; 0 if another thread claimed first.
int64_t JobSlot::claim(Ticket seen, const PhaseWork& phase, int64_t left, int thread) {
  // Claims shrink so that all threads finish together, but stay large enough to outweigh the claim itself and small
  // enough that a thread does not run for long without a check.
  int64_t take = left / (2 * seen.threads());
  take = std::max(take, phase.least.load(std::memory_order_acquire));
  take = std::min(take, phase.most.load(std::memory_order_acquire));
  take = std::min(take, left);
  const auto run = phase.run.load(std::memory_order_acquire);
  void* const self = phase.self.load(std::memory_order_acquire);
  uint64_t expected = seen.bits;
  if (!ticket.compare_exchange_strong(expected, seen.bits + static_cast<uint64_t>(take), std::memory_order_acq_rel,
                                      std::memory_order_relaxed))
    return 0;
  run(self, seen.next(), seen.next() + take, thread);
  return take;
}

// Counts items as done. Returns true if they were the last and this thread has resumed the task.
bool JobSlot::finish(Runner& me, const PhaseWork& phase, int64_t items) {
  const int64_t total = phase.count.load(std::memory_order_relaxed);
  if (done.fetch_add(items, std::memory_order_acq_rel) + items != total) return false;
  job->runner_ = &me;
  me.ended = false;  // the thread may have come from the slot's previous job
  rest.resume();
  // The task has opened another phase, or has ended; if ended, nothing runs, and no other thread changes the ticket.
  if (me.ended) turn(0);
  return true;
}

// Works on the slot's job until the job is over, or, for a helper, until other jobs need its processor more.
void JobSlot::work(Runner& me, Pool& pool) {
  const bool helps = me.thread != 0;
  JobContention job_contention(*this);
  int64_t mine = 0, waiting_since = 0;
  for (;;) {
    const Ticket seen{ticket.load(std::memory_order_acquire)};
    if (me.thread >= seen.threads()) break;  // also if the job is over
    const PhaseWork& phase = phases[seen.phase() & 1];
    const int64_t left = phase.count.load(std::memory_order_acquire) - seen.next();
    if (left > 0 && !job_contention.must_yield(ticks())) {
      mine += claim(seen, phase, left, me.thread);
      waiting_since = 0;
      continue;
    }
    if (mine > 0 && finish(me, phase, std::exchange(mine, 0))) continue;
    if (left > 0) {
      job_contention.yield();
      continue;
    }
    if (helps && pool.leaves(seen.threads())) {
      pool.detach(*this, true);
      return;
    }
    // Other threads have claimed the phase's last items.
    const int64_t now = ticks();
    if (waiting_since == 0) waiting_since = now;
    if (now - waiting_since < job_contention.patience()) {
      pause_processor();
      continue;
    }
    job_contention.sleep(seen);
    waiting_since = 0;
  }
  if (helps) pool.detach(*this, false);
}

void Job::publish(const Work& work, std::coroutine_handle<> rest) {
  const bool first = !begun_;
  begun_ = true;
  slot_->open(work, rest, num_threads);  // the job may be over when open returns
  if (first) Pool::instance().call();
}

void run_task(int num_threads, Task (*make)(void*, Job&), void* given) {
  num_threads = num_threads > kMostThreads ? kMostThreads : num_threads;
  Pool& pool = Pool::instance();
  JobSlot* slot = pool.open(num_threads);
  Runner me{0};
  Job job(slot, slot != nullptr ? num_threads : 1, &me);
  {
    Task task = make(given, job);
    if (slot != nullptr) slot->job = &job;
    task.begin(&job.runner_).resume();
    if (slot != nullptr && !me.ended) slot->work(me, pool);
  }
  pool.close(slot);
}

}  // namespace paged
