// Stores activations in the Hadamard form, for products with many rows (hadamard_product.h).
#pragma once

#include <algorithm>

#include "hadamard.h"
#include "hadamard_panel.h"
#include "matrix_unit.h"

namespace paged {
namespace {

// Pairs of panels that are multiplied together.
constexpr int kPairsTogether = kHasMatrixUnit ? 2 : 1;

// Rows in tiles of kTokenTile, each [cols / kCodesTogether][kTokenTile][kCodesTogether]: one sequential stream for the
// inner loop, whatever the number of columns. Per block of columns, a tile has kTokenTile scales and offsets.
struct HadamardRows {
  int8_t* codes;
  float* scales;
  int32_t* offsets;  // -128 times the sum of a block's codes, as weight codes are stored plus 128
  uint8_t* panels;   // per thread: codes of kPairsTogether pairs of panels
  int num_rows;
  int cols;

  static int tiles(int num_rows) { return (num_rows + kTokenTile - 1) / kTokenTile; }
  static size_t bytes(int num_rows, int cols, int num_threads) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    return line_aligned(padded * code_cols(cols)) + 2 * line_aligned(padded * scale_blocks(cols) * sizeof(float)) +
           2 * kPairsTogether * HadamardPanel::bytes(cols) * num_threads;
  }
  static HadamardRows at(uint8_t* memory, int num_rows, int cols) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    const size_t numbers = line_aligned(padded * scale_blocks(cols) * sizeof(float));
    uint8_t* scales = memory + line_aligned(padded * code_cols(cols));
    return {reinterpret_cast<int8_t*>(memory),
            reinterpret_cast<float*>(scales),
            reinterpret_cast<int32_t*>(scales + numbers),
            scales + 2 * numbers,
            num_rows,
            cols};
  }
  int8_t* tile(int64_t index) const { return codes + index * kTokenTile * code_cols(cols); }
  int64_t block(int64_t tile, int index) const { return (tile * scale_blocks(cols) + index) * kTokenTile; }
  HadamardPanel panel(int thread, int index) const {
    return HadamardPanel::at(panels + (2 * kPairsTogether * thread + index) * HadamardPanel::bytes(cols), cols);
  }
};

#if !defined(__AMX_INT8__)

// Quantizes the rows of a tile, times 1 / rms and norm_weight if given, padded with zero rows: products use a whole
// tile, or an even number of its rows. Rows are processed together, block by block, so that codes are stored as whole
// vectors: storing four bytes of a row at a time took 1.7 times as long on AMD Zen 4.
inline void hadamard_tile(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t tile) {
  alignas(64) float numbers[kTokenTile][kScaleCols];  // one block of columns
  float factors[kTokenTile] = {}, inverses[kTokenTile];
  const int64_t first = tile * kTokenTile;
  const int rows = out.num_rows - first < kTokenTile ? static_cast<int>(out.num_rows - first) : kTokenTile;
  for (int r = 0; r < rows; ++r) inverses[r] = norm_weight != nullptr ? inverse_rms(x, first + r, out.cols, eps) : 1.0f;
  if (rows < kTokenTile) __builtin_memset(numbers[rows], 0, sizeof(numbers[0]) * (kTokenTile - rows));
  int8_t* quads = out.tile(tile);
  for (int b = 0, col = 0; col < out.cols; ++b, col += kScaleCols) {
    const int groups = std::min(out.cols - col, kScaleCols) / kGroup;
    const int64_t at = out.block(tile, b);
    for (int r = 0; r < kTokenTile; ++r)
      out.scales[at + r] =
          r < rows ? inverses[r] * transform_row(x, first + r, col, groups, norm_weight, numbers[r], factors[r]) : 0.0f;
    Ints sums[kTokenTile];
    for (int r = 0; r < kTokenTile; ++r) sums[r] = zero_ints();
    for (int i = 0; i < groups * kGroup; i += 16, quads += 16 * kTokenTile) {
      Ints codes[kTokenTile];
#pragma GCC unroll 8
      for (int r = 0; r < kTokenTile; ++r) {
        codes[r] = to_nearest(mul(load_floats(numbers[r] + i), broadcast(factors[r])));
        sums[r] = add(sums[r], codes[r]);
      }
      store_quads(quads, codes);
    }
    for (int r = 0; r < kTokenTile; ++r) out.offsets[at + r] = -128 * sum_of(sums[r]);
  }
}

#else

// The same for AMX, row by row, since 64 columns of a row are adjacent.
inline void hadamard_tile(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t tile) {
  alignas(64) float numbers[kScaleCols];
  const int64_t first = tile * kTokenTile;
  const int rows = out.num_rows - first < kTokenTile ? static_cast<int>(out.num_rows - first) : kTokenTile;
  for (int r = 0; r < kTokenTile; ++r) {
    int8_t* const codes = out.tile(tile) + r * kAmxCols;
    const auto at = [&](int col) { return codes + col / kAmxCols * kTokenTile * kAmxCols + col % kAmxCols; };
    if (r >= rows) {
      for (int col = 0; col < out.cols; col += kAmxCols) __builtin_memset(at(col), 0, kAmxCols);
      for (int b = 0; b < scale_blocks(out.cols); ++b) out.scales[out.block(tile, b) + r] = 0.0f;
      continue;
    }
    const float inverse = norm_weight != nullptr ? inverse_rms(x, first + r, out.cols, eps) : 1.0f;
    for (int b = 0, col = 0; col < out.cols; ++b, col += kScaleCols) {
      const int groups = std::min(out.cols - col, kScaleCols) / kGroup;
      float factor;
      out.scales[out.block(tile, b) + r] =
          inverse * transform_row(x, first + r, col, groups, norm_weight, numbers, factor);
      for (int i = 0; i < groups * kGroup; i += 16)
        store_int8(at(col + i), to_nearest(mul(load_floats(numbers + i), broadcast(factor))));
    }
    if (out.cols % kAmxCols != 0) __builtin_memset(at(out.cols), 0, code_cols(out.cols) - out.cols);
  }
}

#endif

// Quantizes tiles [first, last) of rows.
inline void hadamard_tiles(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t first,
                           int64_t last) {
  for (int64_t tile = first; tile < last; ++tile) hadamard_tile(x, norm_weight, eps, out, tile);
}

}  // namespace
}  // namespace paged
