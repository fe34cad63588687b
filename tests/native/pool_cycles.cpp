// Stresses the thread pool for a thread sanitizer, as an application would: models that open and close, concurrent jobs
// of many phases, jobs cancelled between two phases, and forks during all of it.
//
// pool_cycles CYCLES: prints one line and returns 0, or prints the failure and returns 1.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

using paged::Job;
using paged::Task;

// The data of a model's step: every phase writes all numbers, and the next one reads those of other threads.
struct Model {
  std::vector<int64_t> numbers, sums;

  explicit Model(int64_t size) : numbers(size), sums(size) {}
};

Task add_one(Job& job, Model& model, int64_t cost) {
  const auto count = static_cast<int64_t>(model.numbers.size());
  co_await job.phase(count, cost, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) model.numbers[i] += 1;
  });
  co_await job.phase(count, cost, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) model.sums[i] += model.numbers[count - 1 - i];
  });
}

// Checks `canceled` between phases, as an engine does between steps.
Task step(Job& job, Model& model, int layers, int64_t cost, const std::atomic<bool>& canceled, int& done) {
  for (; done < layers && !canceled.load(); ++done) co_await add_one(job, model, cost);
}

bool run_model(unsigned seed, int most_threads, const std::atomic<bool>& canceled) {
  std::mt19937 random(seed);
  const int64_t size = 1 + random() % 300;
  const int threads = 1 + static_cast<int>(random() % most_threads), steps = 1 + static_cast<int>(random() % 8);
  const auto model = std::make_unique<Model>(size);
  int64_t expected = 0, expected_sum = 0;
  for (int i = 0; i < steps; ++i) {
    int done = 0;
    const int layers = 1 + static_cast<int>(random() % 12);
    const int64_t cost = random() % 2 == 0 ? paged::kShareCost : paged::kShareCost / 16;
    paged::run_job(threads, [&](Job& job) { return step(job, *model, layers, cost, canceled, done); });
    for (int layer = 0; layer < done; ++layer) expected_sum += ++expected;
  }
  for (int64_t i = 0; i < size; ++i)
    if (model->numbers[i] != expected || model->sums[i] != expected_sum) return false;
  return true;
}

bool run_models(unsigned seed, int count) {
  std::atomic<bool> canceled{false};
  std::atomic<int> right{0};
  std::vector<std::thread> models;
  for (int i = 0; i < count; ++i)
    models.emplace_back([&, i] { right += run_model(seed + static_cast<unsigned>(i), 4, canceled) ? 1 : 0; });
  if (seed % 3 == 0) canceled = true;
  for (std::thread& model : models) model.join();
  return right == count;
}

// The sanitizers' allocators do not survive a fork during another thread's allocation (GCC 12; the C library's does).
// There the child exits at once, and only the parent, which forks during its jobs, is checked.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kChildComputes = false;
#else
constexpr bool kChildComputes = true;
#endif

// The child has a pool of its own: it computes, and exits without cleanup.
bool run_in_child(unsigned seed) {
  const pid_t child = fork();
  if (child == 0) {
    const std::atomic<bool> canceled{false};
    _exit(!kChildComputes || run_model(seed, 4, canceled) ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  const int cycles = count > 1 ? std::atoi(arguments[1]) : 100;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const auto seed = static_cast<unsigned>(cycle) * 7919;
    std::atomic<bool> right{true};
    std::thread beside([&] { right = run_models(seed, 1 + cycle % 4); });
    const bool child = cycle % 5 != 0 || run_in_child(seed + 1);
    beside.join();
    if (!right || !child) {
      std::printf("cycle %d: %s is wrong\n", cycle, right ? "the child" : "a sum");
      return 1;
    }
  }
  std::printf("%d cycles\n", cycles);
  return 0;
}
