// Multiplies panels of bfloat16 weights with all rows, by AMX. Blocks of columns are those of dense_rows.h.
#pragma once

#if defined(__AMX_BF16__)

#include "dense_rows.h"
#include "pairs_amx.h"

namespace paged {
namespace {

// sums[v][row ...] (+)= panel v . rows of x from `row` on, up to 32, over the vectors [first, last) of kWide panels, a
// range of whole blocks.
template <int kTiles, int kWide>
inline void multiply_pair_square(MatrixUnit& unit, const uint8_t* const* panels, const DenseRows& x, int row, int first,
                                 int last, float (*sums)[kPanelRows]) {
  const int left = x.num_rows - row, count = left < kTiles * kAmxRows ? left : kTiles * kAmxRows;
  PairSquare<kTiles, kWide> square;
  for (int v = 0; v < kWide; ++v) {
    square.columns[v] = {reinterpret_cast<const uint32_t*>(panels[v]), kPanelRows};
    square.sums[v] = {sums[static_cast<int64_t>(v) * x.num_rows + row], kPanelRows};
  }
  square.shape(unit, count, kAmxPairs);
  square.begin(first > 0);
  int vector = first;
  for (int block = first; block < last; block += kDenseBlock) {
    const int width = x.width(block);
    square.rows = {reinterpret_cast<const uint32_t*>(x.at<DenseBfloat16>(block, row)), width};
    for (; vector + kAmxPairs <= block + width; vector += kAmxPairs) square.add(vector - block, vector);
  }
  square.end();
  if (vector == last) return;
  square.shape(unit, count, last - vector);
  square.begin(true);
  square.add(vector % kDenseBlock, vector);
  square.end();
}

// sums[v][r] (+)= panel v . row r of x over the block at `first`, for kWide panels and more than 32 rows. Prefetches
// `next`, the panels' blocks that are multiplied afterwards.
template <int kWide>
inline void multiply_pair_block(MatrixUnit& unit, const uint8_t* const* panels, const uint8_t* const (&next)[kWide],
                                const DenseRows& x, int first, float (*sums)[kPanelRows]) {
  const int width = x.width(first), squares = width % kAmxPairs == 0 ? x.num_rows / (2 * kAmxRows) : 0;
  const uint32_t* columns[kWide];
  float* to[kWide];
  for (int v = 0; v < kWide; ++v) {
    columns[v] = reinterpret_cast<const uint32_t*>(panels[v] + static_cast<int64_t>(first) * kVector);
    to[v] = sums[static_cast<int64_t>(v) * x.num_rows];
  }
  // No prefetch for one or two squares, which are bound by memory anyway: 48 rows took 10 % longer with it, 512 take 5
  // to 20 % less.
  int fetched = squares < 3 ? kDenseBlock : 0;
  const auto fetch = [&](int square) {
    for (const int last = kDenseBlock * (square + 1) / squares; fetched < last; ++fetched)
      for (const uint8_t* panel : next) __builtin_prefetch(panel + fetched * kVector, 0, 2);
  };
  const auto* rows = reinterpret_cast<const uint32_t*>(x.at<DenseBfloat16>(first, 0));
  unit.shape(kAmxRows, kAmxRows, kAmxPairs);
  const auto multiply = first > 0 ? multiply_squares<2, kWide, true, kVector, decltype(fetch)>
                                  : multiply_squares<2, kWide, false, kVector, decltype(fetch)>;
  multiply(rows, width, columns, width, kAmxPairs, squares, to, fetch);
  for (int row = squares * 2 * kAmxRows; row < x.num_rows; row += 2 * kAmxRows) {
    const auto rest = x.num_rows - row > kAmxRows ? multiply_pair_square<2, kWide> : multiply_pair_square<1, kWide>;
    rest(unit, panels, x, row, first, first + width, sums);
  }
}

// sums[v][r] = panel v . row r of x, for kGroup panels and all rows, two panels at a time. `next` are the panels that
// are multiplied afterwards, which are prefetched. The sums of few rows stay in tiles from the first column to the
// last, and the hardware prefetcher is as fast as software prefetch; the sums of many rows are reloaded for each block.
template <int kGroup>
inline void multiply_pair_panels(const uint8_t* const (&panels)[kGroup], const uint8_t* const (&next)[kGroup],
                                 const DenseRows& x, float (*sums)[kPanelRows]) {
  constexpr int kWide = kGroup < 2 ? 1 : 2;
  MatrixUnit unit;
  compiler_barrier();
  const auto sums_of = [&](int panel) { return sums + static_cast<int64_t>(panel) * x.num_rows; };
  if (x.num_rows <= 2 * kAmxRows) {
    const auto multiply = x.num_rows > kAmxRows ? multiply_pair_square<2, kWide> : multiply_pair_square<1, kWide>;
    for (int p = 0; p < kGroup; p += kWide) multiply(unit, panels + p, x, 0, 0, x.vectors, sums_of(p));
    return;
  }
  for (int first = 0; first < x.vectors; first += kDenseBlock) {
    const int64_t then = first + kDenseBlock;
    for (int p = 0; p < kGroup; p += kWide) {
      const uint8_t* ahead[kWide];
      for (int v = 0; v < kWide; ++v) ahead[v] = then < x.vectors ? panels[p + v] + then * kVector : next[p + v];
      multiply_pair_block<kWide>(unit, panels + p, ahead, x, first, sums_of(p));
    }
  }
}

}  // namespace
}  // namespace paged

#endif
