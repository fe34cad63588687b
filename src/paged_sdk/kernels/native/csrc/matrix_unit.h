// The matrix unit of x86 processors (Intel AMX): registers of 16 rows of 64 bytes, tiles, and products of two of them.
//
// A product takes 16 cycles for 16 x 16 sums of 64 products each, eight times as many as AVX-512's dot products: its
// left factor has 16 rows of 64 columns, its right one 16 quads of columns, each as a vector of a panel (layout.h). A
// row's sums in int32 are exact, so it gives the bits that every other level gives.
#pragma once

#include <cstdint>

#include "layout.h"

namespace paged {
namespace {

// What was written before is in memory: compilers do not know that loads of tiles read it.
inline void see_memory() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace paged

#if defined(__AMX_INT8__)
#include <immintrin.h>

namespace paged {
namespace {

constexpr bool kHasMatrixUnit = true;
constexpr int kAmxRows = 16;
constexpr int kAmxCols = 64;
constexpr int kAmxBytes = kAmxRows * kAmxCols;

// The shape of all tiles, as the unit reads it.
struct TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {};
  uint8_t rows[16] = {};

  constexpr TileShape() {
    for (int i = 0; i < 8; ++i) bytes_of_row[i] = kAmxCols, rows[i] = kAmxRows;
  }
};
alignas(64) constexpr TileShape kWholeTiles;

// Shapes the tiles of its thread while it lives. What is in tiles would otherwise be saved, all eight kilobytes,
// whenever the system takes the thread's processor away.
class MatrixUnit {
 public:
  MatrixUnit() { _tile_loadconfig(&kWholeTiles); }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
};

// Tiles 0 ... 3 hold sums; 4 and 5 take rows, 6 and 7 weights.

template <int kTiles, int kPanels>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (kPanels == 2) _tile_zero(1);
  if constexpr (kTiles == 2) _tile_zero(2);
  if constexpr (kTiles == 2 && kPanels == 2) _tile_zero(3);
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
constexpr int kAmxRows = 0, kAmxCols = 0;

inline void keep_awake() {}

struct MatrixUnit {};

}  // namespace
}  // namespace paged
#endif
