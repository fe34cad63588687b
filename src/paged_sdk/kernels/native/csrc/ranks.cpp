// Collectives of processes on one machine, in shared memory. Each rank writes its data to its own buffer, waits for the
// others, and adds all buffers in rank order, so that all ranks get the same bits. Gathers of columns work the same
// way.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "abi.h"
#include "system.h"

#if !defined(_WIN32)
#include <time.h>
#endif

namespace paged {
namespace {

constexpr size_t kLine = 64;

// The shared memory begins with cache lines of this kind, initially zero.
struct alignas(kLine) Line {
  std::atomic<uint64_t> turn;  // of a rank: the last collective for which it has written its data
};
static_assert(sizeof(Line) == kLine && std::atomic<uint64_t>::is_always_lock_free);

// The first line tells whether a rank has ended. Then come one line per rank and two buffers per rank. A rank that
// writes for collective n + 2 knows that all ranks have read its data of n, since all have written for n + 1.
struct Shared {
  Line* lines;
  float* places;

  explicit Shared(const paged_ranks& ranks)
      : lines(static_cast<Line*>(ranks.memory)), places(reinterpret_cast<float*>(lines + 1 + ranks.size)) {}
  std::atomic<uint64_t>& ended() const { return lines[0].turn; }
  std::atomic<uint64_t>& turn_of(int rank) const { return lines[1 + rank].turn; }
  float* place(const paged_ranks& ranks, int rank) const {
    return places + (static_cast<int64_t>(ranks.turn & 1) * ranks.size + rank) * ranks.capacity;
  }
};

void sleep_shortly() {
#if defined(_WIN32)
  yield_processor();
#else
  const timespec time{0, 50'000};
  nanosleep(&time, nullptr);
#endif
}

// Waits for a rank: spins for the time between a layer's collectives, then yields, and sleeps after longer than any
// layer takes.
bool wait_for(const Shared& shared, int rank, uint64_t turn) {
  constexpr int kAwake = 1000, kYielding = 2000;
  for (int64_t rounds = 0; shared.turn_of(rank).load(std::memory_order_acquire) < turn; ++rounds) {
    if (shared.ended().load(std::memory_order_relaxed) != 0) return false;
    if (rounds < kAwake) {
      pause_processor();
    } else if (rounds < kYielding) {
      yield_processor();
    } else {
      sleep_shortly();
    }
  }
  return true;
}

// Copies rows of `width` numbers.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t num_rows, int64_t width) {
  for (int64_t row = 0; row < num_rows; ++row)
    std::memcpy(to + row * to_stride, from + row * from_stride, sizeof(float) * width);
}

// Barrier: publishes that this rank has written its buffer, and waits until all ranks have.
bool meet(paged_ranks& ranks, const Shared& shared) {
  shared.turn_of(ranks.rank).store(ranks.turn, std::memory_order_release);
  for (int rank = 0; rank < ranks.size; ++rank)
    if (rank != ranks.rank && !wait_for(shared, rank, ranks.turn)) return false;
  return true;
}

// Sums at most `capacity` numbers.
bool add_part(paged_ranks& ranks, const Shared& shared, float* data, int64_t count) {
  ++ranks.turn;
  std::memcpy(shared.place(ranks, ranks.rank), data, sizeof(float) * count);
  if (!meet(ranks, shared)) return false;
  std::memcpy(data, shared.place(ranks, 0), sizeof(float) * count);
  for (int rank = 1; rank < ranks.size; ++rank) {
    const float* other = shared.place(ranks, rank);
    for (int64_t i = 0; i < count; ++i) data[i] += other[i];
  }
  return true;
}

}  // namespace
}  // namespace paged

// Returns the size of the shared memory, which must be zeroed first.
PAGED_EXPORT int64_t paged_ranks_bytes(int32_t size, int64_t capacity) {
  return static_cast<int64_t>(paged::kLine) * (1 + size) + 2 * size * capacity * static_cast<int64_t>(sizeof(float));
}

// A PagedSum whose group is a paged_ranks. Does nothing once a rank has ended.
PAGED_EXPORT void paged_ranks_sum(void* group, float* data, int64_t count) {
  auto& ranks = *static_cast<paged_ranks*>(group);
  const paged::Shared shared(ranks);
  for (int64_t first = 0; first < count && ranks.failed == 0; first += ranks.capacity) {
    const int64_t part = count - first < ranks.capacity ? count - first : ranks.capacity;
    if (!paged::add_part(ranks, shared, data + first, part)) ranks.failed = 1;
  }
}

// A PagedGather whose group is a paged_ranks. Transfers as many rows at a time as fit, or parts of one row.
PAGED_EXPORT void paged_ranks_gather(void* group, const float* own, int64_t stride, int64_t num_rows,
                                     const int32_t* widths, float* out) {
  auto& ranks = *static_cast<paged_ranks*>(group);
  const paged::Shared shared(ranks);
  int64_t widest = 1, all = 0;
  for (int rank = 0; rank < ranks.size; ++rank) widest = std::max<int64_t>(widest, widths[rank]), all += widths[rank];
  const int64_t cols = std::min(widest, ranks.capacity), rows = ranks.capacity / cols;
  for (int64_t row = 0; row < num_rows; row += rows) {
    const int64_t count = std::min(rows, num_rows - row);
    for (int64_t col = 0; col < widest; col += cols) {
      const auto width_of = [&](int rank) { return std::clamp<int64_t>(widths[rank] - col, 0, cols); };
      if (ranks.failed != 0) return;
      ++ranks.turn;
      const int64_t width = width_of(ranks.rank);
      float* const place = shared.place(ranks, ranks.rank);
      if (width > 0) paged::copy_rows(own + row * stride + col, stride, place, width, count, width);
      if (!paged::meet(ranks, shared)) ranks.failed = 1;
      float* to = out + row * all + col;
      for (int rank = 0; rank < ranks.size && ranks.failed == 0; to += widths[rank++])
        if (width_of(rank) > 0)
          paged::copy_rows(shared.place(ranks, rank), width_of(rank), to, all, count, width_of(rank));
    }
  }
}

// Tells all ranks that one has ended.
PAGED_EXPORT void paged_ranks_end(const paged_ranks* ranks) {
  paged::Shared(*ranks).ended().store(1, std::memory_order_relaxed);
}
