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

inline size_t line_aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

}  // namespace
}  // namespace paged
