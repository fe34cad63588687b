// Decodes single rows of a matrix packed from blocks (layout.h): token embeddings share the output projection's memory.
#pragma once

#include "formats.h"

namespace paged {
namespace {

// Row `r` of a panel, decoded to float32. The offset is taken off the code first, as the file's format does it: a scale
// times a difference of small integers is exact, a difference of two products is not.
template <class Format>
void decode_row(const uint8_t* block, int cols, int r, float* out) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr int kOffset = kLayout.offset_shift < 0 ? 0 : 1 << (kLayout.offset_shift & 7);
  typename Format::BlockScales scales;
  alignas(64) uint8_t bytes[kVector];
  for (int first = 0; first < cols; first += kLayout.block_cols(), block += kLayout.block_bytes()) {
    Format::load_scales(block, scales);
    for (int g = 0; g < kLayout.groups; ++g, out += kGroup) {
      Bytes w[8];
      load_group<kLayout>(block, g, w);
      for (int q = 0; q < 8; ++q) {
        const float scale = scales.scale[Format::kHalfGroups ? 2 * g + q / 4 : g][r];
        store_bytes(bytes, w[q]);
        for (int i = 0; i < 4; ++i) {
          const float number = scale * static_cast<float>(bytes[4 * r + i] - kOffset);
          if constexpr (Format::kMinima) {
            out[4 * q + i] = number + scales.minimum[Format::kHalfGroups ? 2 * g + q / 4 : g][r];
          } else {
            out[4 * q + i] = number;
          }
        }
      }
    }
  }
}

inline void decode_row(const paged_weight& weight, int64_t row, float* out) {
  with_format(weight.format, [&](auto of) {
    using Format = decltype(of);
    const uint8_t* panel = weight.data + row / kPanelRows * Format::kLayout.panel_bytes(weight.cols);
    decode_row<Format>(panel, weight.cols, static_cast<int>(row % kPanelRows), out);
  });
}

}  // namespace
}  // namespace paged
