// Allocates whole pages, and advises the system to use huge pages for memory that will be streamed.
#pragma once

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace paged {

constexpr size_t kSmallPage = 4096;

// Allocates page-aligned memory for free_pages; `bytes` is a multiple of the page size. Returns null if out of memory.
inline void* allocate_pages(size_t bytes) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, kSmallPage);
#else
  return std::aligned_alloc(kSmallPage, bytes);
#endif
}

inline void free_pages(void* data) {
#if defined(_WIN32)
  _aligned_free(data);
#else
  std::free(data);
#endif
}

// Without huge pages, streaming hundreds of megabytes misses the TLB every 4 KiB. A refusal is harmless.
inline void advise_huge_pages(uint8_t* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kSmallPage - 1) & ~(kSmallPage - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kSmallPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Collapses the 2 MiB at `data`, which is 2 MiB aligned, into one huge page and keeps its contents; returns false if
// the system does not: only Linux 6.1 and later can. Unlike madvise before first use, this takes no more memory than is
// in use already.
inline bool collapse_huge_page(void* data) {
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, not defined by older C libraries
  return madvise(data, 2 << 20, kCollapse) == 0;
#else
  (void)data;
  return false;
#endif
}

}  // namespace paged
