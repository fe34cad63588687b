// The micro-kernel: one panel of 16 weight rows times a few activation rows.
#pragma once

#include <type_traits>

#include "dots.h"

namespace paged {
namespace {

// Adds a group's products to the sums of kRows rows, whose activations in this group are a[0], a[1], ...; `at` is the
// index of the group's scale.
template <class Format, int kRows>
[[gnu::always_inline]] inline void add_group(const Bytes (&w)[8], const typename Format::BlockScales& scales, int at,
                                             const ActivationGroup* a, Floats (&sum)[kRows]) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr int kBits = kLayout.bits();
  const auto first_sum = [&](int r, int half) {
    if constexpr (kLayout.offset_shift < 0 || (kBits == 8 && kDotSubtracts128)) {
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

// Calls take(block, first group, number of groups) for each block of a panel.
template <class Format, class Take>
[[gnu::always_inline]] inline void in_blocks(const uint8_t* panel, const paged_weight& weight, const Take& take) {
  constexpr const Layout& kLayout = Format::kLayout;
  const uint8_t* block = panel + kLayout.panel_header;
  const int in_block = kLayout.block_groups(weight.format), in_row = weight.cols / kGroup;
  for (int first = 0, groups; first < in_row; first += groups, block += kLayout.header + groups * kLayout.group_bytes) {
    groups = kLayout.groups > 0 || in_row - first > in_block ? in_block : in_row - first;
    take(block, first, groups);
  }
}

// Prefetches two kilobytes ahead: this covers memory latency at a core's 26 GB/s, and at a panel's end reaches into the
// next panel.
template <class Format>
inline void prefetch_group(const uint8_t* block, int group) {
  constexpr const Layout& kLayout = Format::kLayout;
  for (int line = 0; line < kLayout.group_bytes; line += 64)
    __builtin_prefetch(block + kLayout.header + group * kLayout.group_bytes + line + 2048);
}

// sums[r][0..15] = the panel's 16 rows . activation row `row + r`, for kRows activation rows.
//
// Every row's sum has one order (groups ascending, scale before minimum) whatever kRows is, so results are the same for
// every batch.
template <class Format, int kRows>
inline void multiply_panel(const uint8_t* panel, const paged_weight& weight, const Activations& x, int64_t row,
                           float (*sums)[kPanelRows]) {
  Floats sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = zero_floats();
  typename Format::BlockScales scales;
  in_blocks<Format>(panel, weight, [&](const uint8_t* block, int first, int groups) __attribute__((always_inline)) {
    load_scales<Format>(panel, block, scales);
    for (int g = 0; g < groups; ++g) {
      prefetch_group<Format>(block, g);
      Bytes w[8];
      load_weights<Format>(panel, block, g, w);
      add_group<Format>(w, scales, scale_of<Format>(g), x.at(first + g, row), sum);
    }
  });
  for (int r = 0; r < kRows; ++r) store_floats(sums[r], sum[r]);
}

// Tiles have 16, 14, 12, 10, or up to 8 rows: a further row in a tile takes a third of the time of a tile of its own.
constexpr int next_tile(int rows) { return rows > 8 ? rows - 2 : rows - 1; }

// Calls take(row, integral_constant<rows>) for tiles of the rows from `row` on.
template <int kRows, class Take>
[[gnu::always_inline]] inline void in_tiles(int64_t row, int64_t num_rows, const Take& take) {
  for (; num_rows - row >= kRows; row += kRows) take(row, std::integral_constant<int, kRows>{});
  if constexpr (kRows > 1) in_tiles<next_tile(kRows)>(row, num_rows, take);
}

// Unpacked groups of a panel, kept in the first-level cache: those of a block, or of several smaller blocks.
template <class Format>
struct UnpackedGroups {
  static constexpr int kMost = 8;
  static constexpr bool kOneBlock = Format::kLayout.groups == kMost;
  static constexpr int kBytes = kMost * Format::kLayout.group_bytes + (kOneBlock ? 1 : kMost) * Format::kLayout.header;

  typename Format::BlockScales scales[kOneBlock ? 1 : kMost];
  alignas(64) uint8_t weights[kMost][8 * kVector];
  int first = 0, count = 0;
  const uint8_t* end;  // end of the packed data that was unpacked

  bool full() const { return count == kMost; }
  void start_at(int group) { first = group, count = 0; }
  // Unpacks group g of a block.
  void append(const uint8_t* panel, const uint8_t* block, int g) {
    if (!kOneBlock || g == 0) load_scales<Format>(panel, block, scales[kOneBlock ? 0 : count]);
    Bytes w[8];
    load_weights<Format>(panel, block, g, w);
    for (int q = 0; q < 8; ++q) store_bytes(weights[count] + q * kVector, w[q]);
    ++count;
    end = block + Format::kLayout.header + (g + 1) * Format::kLayout.group_bytes;
  }
};

// Adds products with unpacked groups to the sums of kRows rows. Not inlined: inlined with others, its weights were
// spilled to the stack, and it took twice as long.
template <class Format, int kRows>
[[gnu::noinline]] void add_unpacked(const UnpackedGroups<Format>& groups, const Activations& x, int64_t row,
                                    float (*sums)[kPanelRows]) {
  constexpr bool kOneBlock = UnpackedGroups<Format>::kOneBlock;
  Floats sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = load_floats(sums[r]);
  for (int g = 0; g < groups.count; ++g) {
    Bytes w[8];
    for (int q = 0; q < 8; ++q) w[q] = load_bytes(groups.weights[g] + q * kVector);
    const int at = kOneBlock ? scale_of<Format>(g) : 0;
    add_group<Format>(w, groups.scales[kOneBlock ? 0 : g], at, x.at(groups.first + g, row), sum);
  }
  for (int r = 0; r < kRows; ++r) store_floats(sums[r], sum[r]);
}

// Multiplies the panel with all activation rows, kUnpackedOnce or more of them: each group is unpacked once for all
// rows.
template <class Format>
void multiply_many(const uint8_t* panel, const paged_weight& weight, const Activations& x, float (*sums)[kPanelRows]) {
  __builtin_memset(sums, 0, sizeof(*sums) * x.num_rows);
  UnpackedGroups<Format> unpacked;
  // Prefetches the data that is unpacked next, a part of it before each tile: all at once, lines would wait for each
  // other.
  const auto multiply_unpacked = [&] {
    const uint8_t* ahead = unpacked.end;
    in_tiles<kMaxTile>(0, x.num_rows, [&](int64_t row, auto rows) {
      const uint8_t* to = unpacked.end + UnpackedGroups<Format>::kBytes * (row + rows) / x.num_rows;
      for (; ahead < to; ahead += 64) __builtin_prefetch(ahead);
      add_unpacked<Format, decltype(rows)::value>(unpacked, x, row, sums + row);
    });
  };
  in_blocks<Format>(panel, weight, [&](const uint8_t* block, int first, int groups) {
    for (int g = 0; g < groups; ++g) {
      unpacked.append(panel, block, g);
      if (unpacked.full()) {
        multiply_unpacked();
        unpacked.start_at(first + g + 1);
      }
    }
  });
  if (unpacked.count > 0) multiply_unpacked();
}

// Multiplies the panel with all activation rows: sums[num_rows][16]. The panel is read from memory once: further tiles
// of rows find it in the second-level cache.
template <class Format>
void multiply_rows(const uint8_t* panel, const paged_weight& weight, const Activations& x, float (*sums)[kPanelRows]) {
  if constexpr (kUnpackedOnce<Format> != kNever) {
    if (x.num_rows >= kUnpackedOnce<Format>) return multiply_many<Format>(panel, weight, x, sums);
  }
  in_tiles<kMaxTile>(0, x.num_rows, [&](int64_t row, auto rows) {
    multiply_panel<Format, decltype(rows)::value>(panel, weight, x, row, sums + row);
  });
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
