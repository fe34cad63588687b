// The inner kernel: one panel of 16 weight rows times a few rows of activations.
#pragma once

#include "dots.h"

namespace paged {
namespace {

// sums[r][0..15] = the panel's 16 rows . activation row `row + r`, for kRows activation rows.
//
// Every row's sum is built in one order (groups ascending, scale then minimum), whatever kRows is: one arithmetic for
// every batch.
template <class Format, int kRows>
inline void multiply_panel(const uint8_t* panel, const paged_weight& weight, const Activations& x, int64_t row,
                           float (*sums)[kPanelRows]) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr int kBits = kLayout.bits();
  Floats sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = zero_floats();
  typename Format::BlockScales scales;
  const uint8_t* block = panel + kLayout.panel_header;
  const int in_block = kLayout.block_groups(weight.format), in_row = weight.cols / kGroup;
  for (int first = 0, groups; first < in_row; first += groups, block += kLayout.header + groups * kLayout.group_bytes) {
    groups = kLayout.groups > 0 || in_row - first > in_block ? in_block : in_row - first;
    load_scales<Format>(panel, block, scales);
    for (int g = 0; g < groups; ++g) {
      // Two kilobytes ahead: past the latency of memory at a core's 26 GB/s, and into the next panel at a panel's end.
      for (int line = 0; line < kLayout.group_bytes; line += 64)
        __builtin_prefetch(block + kLayout.header + g * kLayout.group_bytes + line + 2048);
      Bytes w[8];
      load_weights<Format>(panel, block, g, w);
      const int at = scale_of<Format>(g);
      const ActivationGroup* a = x.at(first + g, row);
      const auto first_sum = [&](int r, int half) {
        if constexpr (kLayout.offset_shift < 0 || (kBits == 8 && kTakesOff128)) {
          return zero_ints();
        } else {
          return broadcast_shifted<kLayout.offset_shift>(&a[r].negative_sum[half]);
        }
      };
      const auto add_scaled = [&](int r, Ints lo, Ints hi) {
        const Floats scale_lo = broadcast(a[r].scale[0]), scale_hi = broadcast(a[r].scale[1]);
        if constexpr (Format::kHalfGroups) {
          sum[r] = fma(to_floats(lo), mul(load_floats(scales.scale[at]), scale_lo), sum[r]);
          sum[r] = fma(to_floats(hi), mul(load_floats(scales.scale[at + 1]), scale_hi), sum[r]);
          if constexpr (Format::kMinima) {
            const float sum_lo = a[r].scale[0] * static_cast<float>(-a[r].negative_sum[0]);
            const float sum_hi = a[r].scale[1] * static_cast<float>(-a[r].negative_sum[1]);
            sum[r] = fma(load_floats(scales.minimum[at]), broadcast(sum_lo), sum[r]);
            sum[r] = fma(load_floats(scales.minimum[at + 1]), broadcast(sum_hi), sum[r]);
          }
        } else {
          const Floats dot = fma(to_floats(hi), scale_hi, mul(to_floats(lo), scale_lo));
          sum[r] = fma(dot, load_floats(scales.scale[at]), sum[r]);
          if constexpr (Format::kMinima)
            sum[r] = fma(load_floats(scales.minimum[at]), broadcast(a[r].scaled_sum), sum[r]);
        }
      };
      dot_group<kBits, kRows>(w, a, first_sum, add_scaled);
    }
  }
  for (int r = 0; r < kRows; ++r) store_floats(sums[r], sum[r]);
}

// Tiles have 16, 14, 12, 10 and up to 8 rows: a row more in a tile takes a third of what a tile of its own takes.
constexpr int next_tile(int rows) { return rows > 8 ? rows - 2 : rows - 1; }

// The panel times the rows from `row` on, if there are kRows of them or more.
template <class Format, int kRows>
inline void multiply_tiles(const uint8_t* panel, const paged_weight& weight, const Activations& x, int64_t& row,
                           float (*sums)[kPanelRows]) {
  for (; x.num_rows - row >= kRows; row += kRows) multiply_panel<Format, kRows>(panel, weight, x, row, sums + row);
  if constexpr (kRows > 1) multiply_tiles<Format, next_tile(kRows)>(panel, weight, x, row, sums);
}

// The panel times all activation rows: sums[num_rows][16]. The panel comes from memory once: a second tile of rows
// finds it in the second-level cache.
template <class Format>
void multiply_rows(const uint8_t* panel, const paged_weight& weight, const Activations& x, float (*sums)[kPanelRows]) {
  int64_t row = 0;
  multiply_tiles<Format, kMaxTile>(panel, weight, x, row, sums);
}

struct PanelKernel {
  void (*multiply)(const uint8_t* panel, const paged_weight& weight, const Activations& x, float (*sums)[kPanelRows]);
  int64_t panel_bytes;
};

inline PanelKernel panel_kernel(const paged_weight& weight) {
  return with_format(weight.format, [&](auto of) {
    using Format = decltype(of);
    return PanelKernel{multiply_rows<Format>, Format::kLayout.panel_bytes(weight.format, weight.cols)};
  });
}

}  // namespace
}  // namespace paged
