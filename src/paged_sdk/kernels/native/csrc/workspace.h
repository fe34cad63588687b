// Holds what is kept between calls: scratch memory that grows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

struct paged_workspace {
  uint8_t* data;
  size_t capacity;
};

namespace paged {

// At least `bytes` of scratch, 64-byte aligned; contents are lost when it grows. Null when there is no memory.
uint8_t* reserve(paged_workspace& workspace, size_t bytes);

namespace {

inline size_t line_aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

}  // namespace
}  // namespace paged
