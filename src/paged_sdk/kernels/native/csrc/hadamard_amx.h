// The inner loop of products in the Hadamard form (hadamard_product.h) on AMX (matrix_unit.h).
#pragma once

#include "hadamard_rows.h"

namespace paged {
namespace {

constexpr int kSquareRows = 2 * kAmxRows;

// The product of 32 rows and two panels over one block of columns.
struct Square {
  const int8_t* codes;            // [steps][32][64]
  const uint8_t* weights[2];      // [steps][16 quads][16][4] each
  int steps;                      // steps of 64 columns
  const float* factors;           // [32]: row scales
  const float* scales[2];         // [16] each: panel scales
  float (*products)[kPanelRows];  // [2][32][16]: sums over the blocks so far
  bool is_first;                  // first block: overwrite products
};

// Multiplies squares in a pipeline: while AMX multiplies a square, the sums of the one before become products. AMX's 16
// products of a whole block take 70 ns, and converting the 1,024 sums takes 40.
class SquareLine {
 public:
  // Multiplies a square, and completes the products of the one before.
  [[gnu::noinline]] void multiply(const Square& square) {
    int32_t (*const sums)[kSquareRows][kPanelRows] = sums_[turn_ & 1];
    zero_sums<2, 2>();
    int s = 0;
    if (turn_ > 0) {
      const Parts parts(before_, sums_[~turn_ & 1]);
      if (square.steps == kParts) {
        step(square, 0), parts.finish<0>();
        step(square, 1), parts.finish<1>();
        step(square, 2), parts.finish<2>();
        step(square, 3), parts.finish<3>();
        s = kParts;
      } else {
        step(square, s++);
        parts.finish<0>(), parts.finish<1>(), parts.finish<2>(), parts.finish<3>();
      }
    }
    for (; s < square.steps; ++s) step(square, s);
    _tile_stored(0, sums[0][0], kVector);
    _tile_stored(1, sums[1][0], kVector);
    _tile_stored(2, sums[0][kAmxRows], kVector);
    _tile_stored(3, sums[1][kAmxRows], kVector);
    before_ = square;
    ++turn_;
  }
  // Completes the products of the last square.
  [[gnu::noinline]] void finish() {
    if (turn_ == 0) return;
    const Parts parts(before_, sums_[~turn_ & 1]);
    parts.finish<0>(), parts.finish<1>(), parts.finish<2>(), parts.finish<3>();
    turn_ = 0;
  }

 private:
  static constexpr int kParts = kScaleCols / kAmxCols;
  static constexpr int kPartRows = 2 * kSquareRows / kParts;

  // Converts sums to products in parts of 16 vectors: a loop over all of them would not overlap with AMX.
  struct Parts {
    const int32_t (*sums)[kSquareRows][kPanelRows];
    const float* factors;
    Floats scales[2];
    float (*products)[kPanelRows];
    __mmask16 adds;

    [[gnu::always_inline]] Parts(const Square& square, const int32_t (*sums)[kSquareRows][kPanelRows])
        : sums(sums),
          factors(square.factors),
          scales{load_floats(square.scales[0]), load_floats(square.scales[1])},
          products(square.products),
          adds(square.is_first ? 0 : 0xffff) {}

    template <int kPart>
    [[gnu::always_inline]] void finish() const {
      constexpr int kFirst = kPart * kPartRows, kPanel = kFirst / kSquareRows, kRow = kFirst % kSquareRows;
#pragma GCC unroll 16
      for (int r = kRow; r < kRow + kPartRows; ++r) {
        float* const to = products[kPanel * kSquareRows + r];
        const Floats product = mul(to_floats(_mm512_load_si512(sums[kPanel][r])), scales[kPanel]);
        store_floats(to, fma(product, broadcast(factors[r]), _mm512_maskz_loadu_ps(adds, to)));
      }
    }
  };

  [[gnu::always_inline]] static void step(const Square& square, int index) {
    const int8_t* codes = square.codes + index * kSquareRows * kAmxCols;
    _tile_loadd(4, codes, kAmxCols);
    _tile_loadd(6, square.weights[0] + index * kAmxBytes, kAmxCols);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, square.weights[1] + index * kAmxBytes, kAmxCols);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, codes + kAmxBytes, kAmxCols);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }

  alignas(64) int32_t sums_[2][2][kSquareRows][kPanelRows];
  Square before_;
  int turn_ = 0;
};

// Multiplies `count` panels with all rows. emit(pair, row, products) receives the results of two panels, complete
// except for biases, and fetch(row) prefetches the memory that emit writes. Four panels are processed together, block
// by block, so that rows are read from the second- or third-level cache half as often, and results are written as 256
// bytes per row.
template <class Emit, class Fetch>
inline void multiply_hadamard_group(const HadamardPanel* panels, int count, const HadamardRows& x, const Emit& emit,
                                    const Fetch& fetch) {
  alignas(64) float products[kPairsTogether][2][kSquareRows][kPanelRows];
  SquareLine line;
  const int blocks = scale_blocks(x.cols), pairs = (count + 1) / 2;
  compiler_barrier();
  for (int t = 0; t < HadamardRows::tiles(x.num_rows); ++t) {
    const int64_t first = static_cast<int64_t>(t) * kTokenTile;
    const int rows = x.num_rows - first < kTokenTile ? static_cast<int>(x.num_rows - first) : kTokenTile;
    int fetched = 0;
    for (int b = 0; b < blocks; ++b) {
      const int col = b * kScaleCols, steps = (std::min(x.cols - col, kScaleCols) + kAmxCols - 1) / kAmxCols;
      for (int to = rows * (b + 1) / blocks; fetched < to; ++fetched) fetch(first + fetched);
      for (int pair = 0; pair < pairs; ++pair) {
        const HadamardPanel &even = panels[2 * pair], &odd = panels[std::min(2 * pair + 1, count - 1)];
        line.multiply({x.tile(t) + int64_t{col} * kTokenTile,
                       {even.codes + int64_t{col} * kPanelRows, odd.codes + int64_t{col} * kPanelRows},
                       steps,
                       x.scales + x.block(t, b),
                       {even.scales + b * kPanelRows, odd.scales + b * kPanelRows},
                       products[pair][0],
                       b == 0});
      }
    }
    line.finish();
    for (int r = 0; r < rows; ++r) {
      for (int pair = 0; pair < pairs; ++pair)
        emit(pair, first + r, {load_floats(products[pair][0][r]), load_floats(products[pair][1][r])});
      if (r % 8 == 7) keep_awake();
    }
  }
}

}  // namespace
}  // namespace paged
