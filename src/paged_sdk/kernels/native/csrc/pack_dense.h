// Packs dense rows into panels (layout.h), rounding them to the panel's dtype.
#pragma once

#include <cstring>

#include "abi.h"
#include "layout.h"
#include "simd.h"

namespace paged {
namespace {

constexpr int64_t bytes_of(int32_t dtype) { return dtype == PAGED_FLOAT32 ? 4 : 2; }

// Loads 16 numbers of a dtype as float32.
inline Floats load_numbers(const uint8_t* p, int32_t dtype) {
  if (dtype == PAGED_BFLOAT16) return load_bfloat16(reinterpret_cast<const uint16_t*>(p));
  if (dtype == PAGED_FLOAT16) return load_half(p);
  return load_floats(reinterpret_cast<const float*>(p));
}

// Returns a row's next 64 bytes of a panel: 32 bfloat16 columns in pairs (kPairs), or 16 columns in float32.
template <bool kPairs>
inline Floats load_words(const uint8_t* p, int32_t dtype) {
  if constexpr (kPairs) {
    alignas(64) uint16_t pairs[32];
    if (dtype == PAGED_BFLOAT16) {
      std::memcpy(pairs, p, sizeof pairs);
    } else {
      store_bfloat16(pairs, load_numbers(p, dtype));
      store_bfloat16(pairs + 16, load_numbers(p + 16 * bytes_of(dtype), dtype));
    }
    alignas(64) float words[16];
    std::memcpy(words, pairs, sizeof words);
    return load_floats(words);
  } else {
    return load_numbers(p, dtype);
  }
}

// Packs `count` (up to 16) rows from `row` on; the panel's other rows are zero.
template <int32_t kFormat>
void write_dense_panel(const paged_dense_args& args, int64_t row, int count, uint8_t* out) {
  constexpr bool kPairs = kFormat == PAGED_DENSE_BFLOAT16;
  constexpr int kCols = kPairs ? 32 : 16;
  const int64_t size = bytes_of(args.dtype);
  const auto* rows = static_cast<const uint8_t*>(args.x) + row * args.cols * size;
  for (int col = 0; col < args.cols; col += kCols) {
    const int width = args.cols - col < kCols ? args.cols - col : kCols;
    Floats tile[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      const uint8_t* from = rows + (static_cast<int64_t>(r) * args.cols + col) * size;
      if (r >= count) {
        tile[r] = zero_floats();
      } else if (width == kCols) {
        tile[r] = load_words<kPairs>(from, args.dtype);
      } else {
        alignas(64) uint8_t last[kCols * sizeof(float)] = {};
        std::memcpy(last, from, width * size);
        tile[r] = load_words<kPairs>(last, args.dtype);
      }
    }
    transpose(tile);
    if constexpr (kFormat == PAGED_DENSE_FLOAT16) {
      const int even = (width + 1) / 2 * 2;
      for (int c = 0; c < even; ++c, out += kHalves) store_half(reinterpret_cast<uint16_t*>(out), tile[c]);
    } else {
      const int vectors = kPairs ? (width + 1) / 2 : width;
      for (int v = 0; v < vectors; ++v, out += kVector) store_floats(reinterpret_cast<float*>(out), tile[v]);
    }
  }
}

inline void write_dense_panel(const paged_dense_args& args, int64_t row, int count, uint8_t* out) {
  if (args.format == PAGED_DENSE_BFLOAT16) return write_dense_panel<PAGED_DENSE_BFLOAT16>(args, row, count, out);
  if (args.format == PAGED_DENSE_FLOAT16) return write_dense_panel<PAGED_DENSE_FLOAT16>(args, row, count, out);
  write_dense_panel<PAGED_DENSE_FLOAT32>(args, row, count, out);
}

}  // namespace
}  // namespace paged
