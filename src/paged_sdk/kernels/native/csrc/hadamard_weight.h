// Makes panels of the Hadamard form (layout.h) from weights. It runs once, at load.
#pragma once

#include "formats.h"
#include "hadamard.h"

namespace paged {
namespace {

// A panel of a packed matrix, decoded to float32, [16][cols].
template <class Format>
void unpack_panel(const uint8_t* block, int cols, float* out) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr float kOffset = kLayout.offset_shift < 0 ? 0.0f : static_cast<float>(1 << (kLayout.offset_shift & 7));
  typename Format::BlockScales scales;
  alignas(64) uint8_t bytes[8][kVector];
  for (int first = 0; first < cols; first += kLayout.block_cols(), block += kLayout.block_bytes()) {
    Format::load_scales(block, scales);
    for (int g = 0; g < kLayout.groups; ++g) {
      Bytes w[8];
      load_group<kLayout>(block, g, w);
      for (int q = 0; q < 8; ++q) store_bytes(bytes[q], w[q]);
      for (int r = 0; r < kPanelRows; ++r) {
        float* row = out + static_cast<int64_t>(r) * cols + first + g * kGroup;
        for (int half = 0; half < 2; ++half) {
          const float scale = scales.scale[Format::kHalfGroups ? 2 * g + half : g][r];
          const float least = Format::kMinima ? scales.minimum[g][r] : -kOffset * scale;
          for (int q = 4 * half; q < 4 * half + 4; ++q)
            for (int i = 0; i < 4; ++i) row[4 * q + i] = scale * static_cast<float>(bytes[q][4 * r + i]) + least;
        }
      }
    }
  }
}

inline void unpack_panel(const paged_weight& weight, int64_t panel, float* out) {
  with_format(weight.format, [&](auto of) {
    using Format = decltype(of);
    unpack_panel<Format>(weight.data + panel * Format::kLayout.panel_bytes(weight.cols), weight.cols, out);
  });
}

inline void load_panel(const paged_hadamard_args& args, int64_t panel, float* out) {
  if (args.packed != nullptr) return unpack_panel(*args.packed, panel, out);
  for (int r = 0; r < kPanelRows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    float* to = out + static_cast<int64_t>(r) * args.cols;
    if (row < args.rows) {
      __builtin_memcpy(to, args.x + row * args.x_stride, sizeof(float) * args.cols);
    } else {
      __builtin_memset(to, 0, sizeof(float) * args.cols);
    }
  }
}

// `own` is the calling thread's memory for a panel in float32.
inline void hadamard_panel(const paged_hadamard_args& args, int64_t panel, float* own) {
  load_panel(args, panel, own);
  const int block = hadamard_block(args.cols);
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(block));
  uint8_t* out = args.out + panel * hadamard_panel_bytes(args.cols);
  alignas(64) float scales[kPanelRows];
  for (int r = 0; r < kPanelRows; ++r) {
    float* row = own + static_cast<int64_t>(r) * args.cols;
    const auto largest = static_cast<uint32_t>(max_of(hadamard_row(row, args.cols, block)));
    scales[r] = unit_of(largest) * norm;
    quantize_quads<kVector, 0x80808080>(row, args.cols, largest, out + kHadamardHeader + 4 * r);  // plus 128
  }
  __builtin_memcpy(out, scales, sizeof scales);
}

}  // namespace
}  // namespace paged
