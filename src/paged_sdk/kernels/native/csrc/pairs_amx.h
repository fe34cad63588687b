// AMX products of bfloat16 pairs (matrix_unit.h), accumulated in float32, 32 products at a time. The order of a row's
// sums does not depend on the other rows. Subnormal numbers are flushed to zero, as in AVX-512's dot products of pairs.
#pragma once

#include <type_traits>

#include "matrix_unit.h"

namespace paged {
namespace {

// A matrix of pairs or sums: rows of 4-byte words.
template <class Word>
struct Words {
  Word* data;
  int64_t stride;  // words from row to row

  Words from(int64_t row, int64_t col) const { return {data + row * stride + col, stride}; }
  int64_t pitch() const { return stride * static_cast<int64_t>(sizeof(Word)); }
};

// A product of up to 32 rows and two vectors of columns, with sums that stay in tiles along the depth.
template <int kTiles, int kWide>
struct PairSquare {
  Words<const uint32_t> rows;
  Words<const uint32_t> columns[kWide];
  Words<float> sums[kWide];

  // Configures tiles for num_rows rows and products of `depth` pairs.
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
  // Adds the products of as many pairs as tiles are configured for: pairs of rows from `pair` on, of columns from `k`
  // on.
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

// A tile's number.
template <int kTile>
using Tile = std::integral_constant<int, kTile>;

// sums (+)= rows . columns for `count` squares of 16 kTiles rows and 16 kVectors columns, one below the other. A row
// has `stride` words. kPitch is the distance in bytes along the depth, and between the sums of a vector's 16 rows.
// Tiles are configured for `step` pairs, and `depth` is a multiple of it. Each tile of sums is stored just before that
// tile begins the next square: when all were stored together, a fifth of the time of products with 64 columns passed
// between squares. before(i) is called before square i.
template <int kTiles, int kVectors, bool kAdds, int kPitch, class Before>
inline void multiply_squares(const uint32_t* rows, int64_t stride, const uint32_t* const (&columns)[kVectors],
                             int depth, int step, int count, float* const (&sums)[kVectors], const Before& before) {
  constexpr int kWords = kPitch / sizeof(uint32_t), kBelow = kAmxRows * kWords;
  const int64_t pitch = stride * sizeof(uint32_t);
  const auto place_of = [&](auto tile, int square) {
    return sums[tile % 2] + (static_cast<int64_t>(square) * kTiles + tile / 2) * kBelow;
  };
  for (int i = 0; i < count; ++i, rows += kTiles * kAmxRows * stride) {
    const auto turn = [&](auto tile) {
      if (i > 0) store_tile<tile>(place_of(tile, i - 1), kPitch);
      if constexpr (kAdds) {
        load_tile<tile>(place_of(tile, i), kPitch);
      } else {
        zero_tile<tile>();
      }
    };
    const auto add = [&](int pair, const auto& begin) {
      _tile_loadd(4, rows + pair, pitch);
      _tile_loadd(6, columns[0] + pair * kWords, kPitch);
      begin(Tile<0>{});
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kVectors == 2) {
        _tile_loadd(7, columns[1] + pair * kWords, kPitch);
        begin(Tile<1>{});
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTiles == 2) {
        _tile_loadd(5, rows + kAmxRows * stride + pair, pitch);
        begin(Tile<2>{});
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (kTiles == 2 && kVectors == 2) {
        begin(Tile<3>{});
        _tile_dpbf16ps(3, 5, 7);
      }
    };
    before(i);
    add(0, turn);
    for (int pair = step; pair < depth; pair += step) add(pair, [](auto) {});
  }
  if (count == 0) return;
  const auto end = [&](auto tile) { store_tile<tile>(place_of(tile, count - 1), kPitch); };
  end(Tile<0>{});
  if constexpr (kVectors == 2) end(Tile<1>{});
  if constexpr (kTiles == 2) end(Tile<2>{});
  if constexpr (kTiles == 2 && kVectors == 2) end(Tile<3>{});
}

}  // namespace
}  // namespace paged
