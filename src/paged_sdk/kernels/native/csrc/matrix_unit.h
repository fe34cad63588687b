// Wraps Intel AMX: tile registers of 16 rows of 64 bytes, and products of two tiles.
//
// A product of int8 tiles takes 16 cycles for 16 x 16 sums of 64 products each, eight times the rate of AVX-512's dot
// products. Its left factor has 16 rows of 64 columns; its right one has 16 quads of columns, each a vector of a panel
// (layout.h). A row's int32 sums are exact, so they have the same bits as on every other level.
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
constexpr int kAmxQuads = kAmxCols / 4;  // quads of bytes in a row of a tile
constexpr int kAmxPairs = kAmxCols / 4;  // pairs of bfloat16 in a row of a tile

// Compiler barrier: commits earlier stores to memory, since compilers do not know that tile loads read it.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// Configures its thread's tiles during its lifetime. The destructor releases them, because the system would otherwise
// save all eight kilobytes of them at every context switch.
class MatrixUnit {
 public:
  MatrixUnit() { shape(kAmxRows, kAmxRows, kAmxQuads); }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;

  // Sets the rows of tiles 0, 1 and 4 and of tiles 2, 3 and 5, and the depth of products, in 4-byte words. Tile
  // contents are lost.
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
    asm volatile("" : : "r"(&tiles) : "memory");  // compilers assume that only one word of it is read
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

// Tiles 0 ... 3 are accumulators, 4 and 5 hold rows, 6 and 7 weights. A tile's number must be a literal.

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

// Issues a dummy product. After some 2,000 cycles without a product AMX powers down, and the next product takes 330 to
// 550 ns (Granite Rapids), so longer work between products calls this.
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
