// Memory in whole pages, and advice to the system about memory that will be streamed.
#pragma once

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace paged {

constexpr size_t kSmallPage = 4096;

// Takes memory that begins at a page, for free_pages to give back; `bytes` is a multiple of a page. Null: there is none.
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

// Without huge pages a stream through hundreds of megabytes misses the TLB every 4 KiB. A refusal changes nothing else.
inline void advise_huge_pages(uint8_t* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kSmallPage - 1) & ~(kSmallPage - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kSmallPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Has the system put the 2 MiB at `data`, a multiple of that, into one huge page, whose content stays; false where it
// does not: only Linux from 6.1 on does so. In contrast to advice that is given before memory is used, no more memory
// is taken than has been used.
inline bool collapse_huge_page(void* data) {
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older C libraries do not name
  return madvise(data, 2 << 20, kCollapse) == 0;
#else
  (void)data;
  return false;
#endif
}

}  // namespace paged
