// The matrix unit of x86 processors (Intel AMX): registers of 16 rows of 64 bytes, tiles, and products of two of them.
//
// A product takes 16 cycles for 16 x 16 sums of 64 products each, eight times as many as AVX-512's dot products: its
// left factor has 16 rows of 64 columns, its right one 16 quads of columns, each as a vector of a panel (layout.h). A
// row's sums in int32 are exact, so it gives the bits that every other level gives.
#pragma once

#include <cstdint>

#include "layout.h"

#if defined(__AMX_INT8__)
#include <immintrin.h>

namespace paged {
namespace {

constexpr bool kHasMatrixUnit = true;
constexpr int kAmxRows = 16;
constexpr int kAmxCols = 64;
constexpr int kAmxBytes = kAmxRows * kAmxCols;
constexpr int kAmxQuads = kAmxCols / 4;  // of bytes
constexpr int kAmxPairs = kAmxCols / 4;  // of bfloat16 numbers

// What was written before is in memory: compilers do not know that loads of tiles read it.
inline void see_memory() { asm volatile("" ::: "memory"); }

// Shapes the tiles of its thread while it lives. What is in tiles would otherwise be saved, all eight kilobytes,
// whenever the system takes the thread's processor away.
class MatrixUnit {
 public:
  MatrixUnit() { shape(kAmxRows, kAmxRows, kAmxQuads); }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;

  // Rows of tiles 0, 1 and 4 and of tiles 2, 3 and 5, and the depth of products, in words of 4 bytes. What was in tiles
  // is lost.
  void shape(int first_rows, int second_rows, int depth) {
    const uint32_t shape = first_rows << 16 | second_rows << 8 | depth;
    if (shape == shape_) return;
    shape_ = shape;
    const auto rows_of = [&](int tile) { return tile == 0 || tile == 1 || tile == 4 ? first_rows : second_rows; };
    alignas(64) Shape tiles{};
    for (int i = 0; i < 8; ++i) {
      tiles.bytes_of_row[i] = i == 4 || i == 5 ? 4 * depth : kAmxCols;
      tiles.rows[i] = static_cast<uint8_t>(i < 6 ? rows_of(i) : depth);
    }
    asm volatile("" : : "r"(&tiles) : "memory");  // compilers take it that a word of it is read
    _tile_loadconfig(&tiles);
  }

 private:
  struct Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {};
    uint8_t rows[16] = {};
  };
  uint32_t shape_ = 0;
};

// Tiles 0 ... 3 hold sums; 4 and 5 take rows, 6 and 7 weights. The number of a tile has to be a literal.

template <int kTile>
inline void zero_tile() {
  if constexpr (kTile == 0) _tile_zero(0);
  if constexpr (kTile == 1) _tile_zero(1);
  if constexpr (kTile == 2) _tile_zero(2);
  if constexpr (kTile == 3) _tile_zero(3);
}

template <int kTile>
inline void load_tile(const float* sums, int64_t pitch) {
  if constexpr (kTile == 0) _tile_loadd(0, sums, pitch);
  if constexpr (kTile == 1) _tile_loadd(1, sums, pitch);
  if constexpr (kTile == 2) _tile_loadd(2, sums, pitch);
  if constexpr (kTile == 3) _tile_loadd(3, sums, pitch);
}

template <int kTile>
inline void store_tile(float* sums, int64_t pitch) {
  if constexpr (kTile == 0) _tile_stored(0, sums, pitch);
  if constexpr (kTile == 1) _tile_stored(1, sums, pitch);
  if constexpr (kTile == 2) _tile_stored(2, sums, pitch);
  if constexpr (kTile == 3) _tile_stored(3, sums, pitch);
}

template <int kTiles, int kPanels>
inline void zero_sums() {
  zero_tile<0>();
  if constexpr (kPanels == 2) zero_tile<1>();
  if constexpr (kTiles == 2) zero_tile<2>();
  if constexpr (kTiles == 2 && kPanels == 2) zero_tile<3>();
}

// Has the unit multiply something. After some 2,000 cycles without a product it sleeps, and the next one takes 330 to
// 550 ns (Granite Rapids), so whatever takes longer between products calls this meanwhile.
inline void keep_awake() { _tile_dpbssd(3, 5, 7); }

}  // namespace
}  // namespace paged
#else

namespace paged {
namespace {

constexpr bool kHasMatrixUnit = false;

inline void keep_awake() {}

struct MatrixUnit {};

}  // namespace
}  // namespace paged
#endif
