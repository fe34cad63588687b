// Holds scratch memory that is kept between calls and grows on demand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

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

// Divides scratch memory into parts, one after the other, each aligned to a cache line. On null it only measures: what
// it returns must not be used then, but used() is the size that the same parts take.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), next_(begin_) {}

  template <class Element>
  Element* take(size_t count) {
    const uintptr_t taken = next_;
    next_ += line_aligned(sizeof(Element) * count);
    return reinterpret_cast<Element*>(taken);
  }
  size_t used() const { return next_ - begin_; }

 private:
  uintptr_t begin_, next_;
};

}  // namespace
}  // namespace paged
