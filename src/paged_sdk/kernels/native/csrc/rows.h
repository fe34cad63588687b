// Decodes single rows of a packed matrix (layout.h): token embeddings share the output projection's memory.
#pragma once

#include "formats.h"

namespace paged {
namespace {

// Decodes row `r` of a panel to float32. The offset is subtracted from the code first, as the file format defines: a
// scale times a difference of small integers is exact, a difference of two products is not.
template <class Format>
void decode_row(const uint8_t* panel, const paged_weight& weight, int r, float* out) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr int kOffset = kLayout.offset_shift < 0 ? 0 : 1 << (kLayout.offset_shift & 7);
  typename Format::BlockScales scales;
  alignas(64) uint8_t bytes[kVector];
  const uint8_t* block = panel + kLayout.panel_header;
  const int in_block = kLayout.block_groups(weight.format), in_row = weight.cols / kGroup;
  for (int first = 0, groups; first < in_row; first += groups, block += kLayout.header + groups * kLayout.group_bytes) {
    groups = in_row - first < in_block ? in_row - first : in_block;
    load_scales<Format>(panel, block, scales);
    for (int g = 0; g < groups; ++g, out += kGroup) {
      Bytes w[8];
      load_weights<Format>(panel, block, g, w);
      for (int q = 0; q < 8; ++q) {
        const int at = scale_of<Format>(g) + (Format::kHalfGroups ? q / 4 : 0);
        const float scale = scales.scale[at][r];
        store_bytes(bytes, w[q]);
        for (int i = 0; i < 4; ++i) {
          const float number = scale * static_cast<float>(bytes[4 * r + i] - kOffset);
          if constexpr (Format::kMinima) {
            out[4 * q + i] = number + scales.minimum[at][r];
          } else {
            out[4 * q + i] = number;
          }
        }
      }
    }
  }
}

// The same for a dense panel.
inline void decode_dense_row(const uint8_t* panel, const paged_weight& weight, int r, float* out) {
  if (weight.format == PAGED_DENSE_BFLOAT16) {
    const auto* const pairs = reinterpret_cast<const uint16_t*>(panel) + 2 * r;
    for (int c = 0; c < weight.cols; ++c)
      out[c] = from_bits(static_cast<uint32_t>(pairs[c / 2 * 2 * kPanelRows + c % 2]) << 16);
  } else if (weight.format == PAGED_DENSE_FLOAT16) {
    const auto* const halves = reinterpret_cast<const uint16_t*>(panel) + r;
    for (int c = 0; c < weight.cols; ++c) out[c] = half_to_float(halves[c * kPanelRows]);
  } else {
    const auto* const floats = reinterpret_cast<const float*>(panel) + r;
    for (int c = 0; c < weight.cols; ++c) out[c] = floats[c * kPanelRows];
  }
}

inline void decode_row(const paged_weight& weight, int64_t row, float* out) {
  if (is_dense(weight.format)) {
    const int64_t bytes = dense_panel_bytes(weight.format, weight.cols);
    return decode_dense_row(weight.data + row / kPanelRows * bytes, weight, static_cast<int>(row % kPanelRows), out);
  }
  with_format(weight.format, [&](auto of) {
    using Format = decltype(of);
    const uint8_t* panel =
        weight.data + row / kPanelRows * Format::kLayout.panel_bytes(weight.format, weight.cols);
    decode_row<Format>(panel, weight, static_cast<int>(row % kPanelRows), out);
  });
}

}  // namespace
}  // namespace paged
