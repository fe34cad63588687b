// Holds scratch memory that is kept between calls and grows on demand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

struct paged_workspace {
  uint8_t* data;
  size_t capacity;
};

namespace paged {

// Returns at least `bytes` of scratch memory, 64-byte aligned, or null if out of memory. Contents are lost when it
// grows.
uint8_t* reserve(paged_workspace& workspace, size_t bytes);

namespace {

constexpr size_t line_aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

// A part that is written past its end reaches the next one, which no sanitizer sees: for `make sanitize`, each is
// followed by memory that must not be touched while the parts are in use.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGap = 64;
inline void close_memory(uintptr_t at, size_t bytes) {
  __asan_poison_memory_region(reinterpret_cast<void*>(at), bytes);
}
inline void open_memory(uintptr_t at, size_t bytes) {
  __asan_unpoison_memory_region(reinterpret_cast<void*>(at), bytes);
}
#else
constexpr size_t kGap = 0;
inline void close_memory(uintptr_t, size_t) {}
inline void open_memory(uintptr_t, size_t) {}
#endif

// Divides scratch memory into parts, one after the other, each aligned to a cache line. On null it only measures: what
// it returns must not be used then, but used() is the size that the same parts take. The parts are in use until the
// arena ends.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), next_(begin_) {}
  Arena(const Arena&) = delete;
  ~Arena() {
    if (begin_ != 0) open_memory(begin_, used());  // another arena may divide it otherwise
  }

  template <class Element>
  Element* take(size_t count) {
    const uintptr_t taken = next_;
    const size_t bytes = line_aligned(sizeof(Element) * count);
    next_ += bytes + kGap;
    if (begin_ != 0) close_memory(taken + bytes, kGap);
    return reinterpret_cast<Element*>(taken);
  }
  size_t used() const { return next_ - begin_; }

 private:
  uintptr_t begin_, next_;
};

}  // namespace
}  // namespace paged
