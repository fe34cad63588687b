// Products of bfloat16 numbers, in pairs, by the matrix unit (matrix_unit.h): sums of float32, 32 products at a time,
// each row's in one order, whatever the other rows are. As with AVX-512's dot products of pairs, subnormal numbers are
// zero.
#pragma once

#include "matrix_unit.h"

namespace paged {
namespace {

// A matrix of pairs or of sums: rows of 4-byte words.
template <class Word>
struct Words {
  Word* data;
  int64_t stride;  // words from row to row

  Words from(int64_t row, int64_t col) const { return {data + row * stride + col, stride}; }
  int64_t pitch() const { return stride * static_cast<int64_t>(sizeof(Word)); }
};

// Up to 32 rows and two vectors of columns: sums that are held in tiles while depth goes by.
template <int kTiles, int kWide>
struct PairSquare {
  Words<const uint32_t> rows;
  Words<const uint32_t> columns[kWide];
  Words<float> sums[kWide];

  // Shapes tiles for so many rows, and products of so many pairs.
  static void shape(MatrixUnit& unit, int num_rows, int depth) {
    const int first = num_rows < kAmxRows ? num_rows : kAmxRows;
    unit.shape(first, kTiles == 2 ? num_rows - kAmxRows : first, depth);
  }
  void begin(bool adds) const {
    if (!adds) return zero_sums<kTiles, kWide>();
    _tile_loadd(0, sums[0].data, sums[0].pitch());
    if constexpr (kWide == 2) _tile_loadd(1, sums[1].data, sums[1].pitch());
    if constexpr (kTiles == 2) _tile_loadd(2, sums[0].from(kAmxRows, 0).data, sums[0].pitch());
    if constexpr (kTiles == 2 && kWide == 2) _tile_loadd(3, sums[1].from(kAmxRows, 0).data, sums[1].pitch());
  }
  // Adds the products of as many pairs as tiles are shaped for: those of rows from `pair` on, of columns from `k` on.
  void add(int pair, int k) const {
    _tile_loadd(4, rows.from(0, pair).data, rows.pitch());
    _tile_loadd(6, columns[0].from(k, 0).data, columns[0].pitch());
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWide == 2) {
      _tile_loadd(7, columns[1].from(k, 0).data, columns[1].pitch());
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTiles == 2) {
      _tile_loadd(5, rows.from(kAmxRows, pair).data, rows.pitch());
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kWide == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  void end() const {
    _tile_stored(0, sums[0].data, sums[0].pitch());
    if constexpr (kWide == 2) _tile_stored(1, sums[1].data, sums[1].pitch());
    if constexpr (kTiles == 2) _tile_stored(2, sums[0].from(kAmxRows, 0).data, sums[0].pitch());
    if constexpr (kTiles == 2 && kWide == 2) _tile_stored(3, sums[1].from(kAmxRows, 0).data, sums[1].pitch());
  }
};

}  // namespace
}  // namespace paged
