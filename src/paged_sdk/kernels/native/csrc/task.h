// Defines Task, a coroutine that can wait for other threads. Its code reads from top to bottom; where it awaits a phase
// (pool.h), the thread that finishes the phase's last item resumes it.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace paged {

struct Runner;

class [[nodiscard]] Task {
 public:
  struct promise_type {
    std::coroutine_handle<> parent = nullptr;  // resumed when this task has ended
    Runner** runner = nullptr;                 // of a root task: its runner, told of the end

    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Ending {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> ended) noexcept {
          return ended.promise().go_on();
        }
        void await_resume() noexcept {}
      };
      return Ending{};
    }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
    std::coroutine_handle<> go_on() noexcept;
  };

  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // Awaits this task within another one.
  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> parent) noexcept {
    handle_.promise().parent = parent;
    return handle_;
  }
  void await_resume() const noexcept {}

  // Returns the handle that starts a root task.
  std::coroutine_handle<> begin(Runner** runner) {
    handle_.promise().runner = runner;
    return handle_;
  }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace paged
