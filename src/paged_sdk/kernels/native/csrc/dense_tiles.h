// Multiplies panels of dense weights with all rows, in register tiles of vectors.
//
// Columns are processed in blocks: a block of a few panels stays in the first-level cache while all rows pass over it,
// and the next block is prefetched from memory meanwhile.
#pragma once

#include <type_traits>

#include "dense_rows.h"

namespace paged {
namespace {

// Prefetches of a tile of rows: per vector, one cache line of each panel's next block, or a fraction of a line.
template <int kWide>
struct DenseAhead {
  const uint8_t* next[kWide];
  int step;
};

// The cache level that a tile prefetches into. A lone tile is done with a line as soon as it has multiplied it. Several
// tiles reread theirs, and two blocks of four panels, 48 KiB, exceed the first level, so the next block waits in the
// second.
enum class Fetch { kNothing, kToFirstLevel, kToSecondLevel };

template <Fetch kFetch>
inline void fetch_line(const uint8_t* line) {
  if constexpr (kFetch == Fetch::kToFirstLevel) __builtin_prefetch(line, 0, 3);
  if constexpr (kFetch == Fetch::kToSecondLevel) __builtin_prefetch(line, 0, 2);
}

// Calls take(integral_constant<part>) for each part of a vector.
template <int kParts, class Take>
inline void each_part(const Take& take) {
  take(std::integral_constant<int, 0>{});
  if constexpr (kParts == 2) take(std::integral_constant<int, 1>{});
}

// Register tile: sums[v][r] (+)= panel v . row r of x, for `vectors` vectors of kWide panels and kRows rows; `pitch` is
// the distance between two panels' sums.
template <class Dense, int kRows, int kWide, Fetch kFetch>
inline void multiply_dense_tile(const uint8_t* const (&panels)[kWide], const DenseAhead<kWide>& ahead,
                                const typename Dense::Element* x, int vectors, float (*sums)[kPanelRows],
                                int64_t pitch, bool accumulate) {
  const int64_t stride = static_cast<int64_t>(vectors) * Dense::kCols;
  // GCC 12 keeps the accumulators in registers throughout only if every loop over them is unrolled. Otherwise it copied
  // all of them to memory and back before and after the columns, which took 2 to 4 % of a product with many rows.
  Floats sum[kRows][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sum[r][v] = accumulate ? load_floats(sums[v * pitch + r]) : zero_floats();
  for (int64_t i = 0; i < vectors; ++i) {
    for (int v = 0; v < kWide; ++v) fetch_line<kFetch>(ahead.next[v] + i * ahead.step);
    // One part for all rows, then the other: the weights of both parts would take registers from the accumulators.
    each_part<Dense::kParts>([&](auto part) {
      constexpr int kPart = decltype(part)::value;
      typename Dense::Vector w[kWide];
      for (int v = 0; v < kWide; ++v) w[v] = Dense::template load<kPart>(panels[v] + i * kVector);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename Dense::Vector same = Dense::template same<kPart>(x + r * stride + i * Dense::kCols);
        for (int v = 0; v < kWide; ++v) sum[r][v] = Dense::multiply_add(w[v], same, sum[r][v]);
      }
    });
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) store_floats(sums[v * pitch + r], sum[r][v]);
}

// The same, not inlined. Inlined into a loop over panels, GCC 12 spilled accumulators of AVX2's tile: 76 GFLOP/s per
// core instead of 110. The larger tiles of AVX-512 lose up to 8 % by a call.
template <class Dense, int kRows, int kWide, Fetch kFetch>
[[gnu::noinline]] void call_dense_tile(const uint8_t* const (&panels)[kWide], const DenseAhead<kWide>& ahead,
                                       const typename Dense::Element* x, int vectors, float (*sums)[kPanelRows],
                                       int64_t pitch, bool accumulate) {
  multiply_dense_tile<Dense, kRows, kWide, kFetch>(panels, ahead, x, vectors, sums, pitch, accumulate);
}

// Rows of a tile of kWide panels: as many as fit the registers, at most twice as many as with the most panels.
template <int kWide>
constexpr int kTallest = kWide < kDensePanels ? 2 * kDenseRows : kDenseRows * kDensePanels / kWide;

// Calls take(integral_constant<count>) for a count of rows up to kRows.
template <int kRows, class Take>
inline void with_dense_rows(int count, const Take& take) {
  if (count == kRows) {
    take(std::integral_constant<int, kRows>{});
  } else if constexpr (kRows > 1) {
    with_dense_rows<kRows - 1>(count, take);
  }
}

// sums[v][r] = panel v . row r of x, for kGroup panels and all rows, in tiles of kWide panels. `next` are the panels
// that are multiplied afterwards, which are prefetched.
template <class Dense, int kWide, int kGroup>
inline void multiply_dense_tiles(const uint8_t* const (&panels)[kGroup], const uint8_t* const (&next)[kGroup],
                                 const DenseRows& x, float (*sums)[kPanelRows]) {
  const int tiles = (x.num_rows + kTallest<kWide> - 1) / kTallest<kWide>;
  // Up to four tiles share the prefetches, so that memory is never idle. With 16 rows, i.e. three tiles, prefetching in
  // two of them read 21 to 22 GB/s, in all three 24, on a Zen 4 that multiplies as fast.
  const int shares = tiles < 4 ? tiles : 4, step = (kVector + shares - 1) / shares;
  for (int first = 0; first < x.vectors; first += kDenseBlock) {
    const int width = x.width(first);
    for (int begin = 0; begin < kGroup; begin += kWide) {
      const uint8_t* here[kWide];
      DenseAhead<kWide> ahead;
      for (int v = 0; v < kWide; ++v) {
        here[v] = panels[begin + v] + static_cast<int64_t>(first) * kVector;
        ahead.next[v] = first + kDenseBlock < x.vectors ? here[v] + kDenseBlock * kVector : next[begin + v];
      }
      float(*to)[kPanelRows] = sums + static_cast<int64_t>(begin) * x.num_rows;
      for (int t = 0; t < tiles; ++t) {
        // Tiles of nearly equal height: the few accumulators of a low tile would wait for each other.
        const int row = static_cast<int>(static_cast<int64_t>(x.num_rows) * t / tiles);
        const int end = static_cast<int>(static_cast<int64_t>(x.num_rows) * (t + 1) / tiles);
        ahead.step = t < shares ? step : 0;
        with_dense_rows<kTallest<kWide>>(end - row, [&](auto rows) {
          const auto multiply = [&](auto fetch) {
            constexpr int kRows = decltype(rows)::value;
            constexpr Fetch kFetch = decltype(fetch)::value;
            constexpr auto tile = kWide < kGroup ? call_dense_tile<Dense, kRows, kWide, kFetch>
                                                 : multiply_dense_tile<Dense, kRows, kWide, kFetch>;
            tile(here, ahead, x.at<Dense>(first, row), width, to + row, x.num_rows, first > 0);
          };
          if (ahead.step == 0) {  // without prefetches, the tile needs no registers for them
            multiply(std::integral_constant<Fetch, Fetch::kNothing>{});
          } else if (tiles == 1) {
            multiply(std::integral_constant<Fetch, Fetch::kToFirstLevel>{});
          } else {
            multiply(std::integral_constant<Fetch, Fetch::kToSecondLevel>{});
          }
        });
        for (int v = 0; v < kWide; ++v) ahead.next[v] += ahead.step * width;
      }
    }
  }
}

}  // namespace
}  // namespace paged
