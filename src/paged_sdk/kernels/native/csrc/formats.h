// Defines, for each packed format, how a kernel reads a block's scales and a group's weights (layout.h has the memory
// layout).
#pragma once

#include "abi.h"
#include "layout.h"
#include "simd.h"

namespace paged {
namespace {

// Scales of a block, per group of 32 columns (per half group if kHalfGroups), and minima, which are added.
template <int kScales, int kMinima>
struct Scales {
  alignas(64) float scale[kScales][kPanelRows];
  alignas(64) float minimum[kMinima][kPanelRows];
};

inline void load_pairs(const uint8_t* p, Bytes w[8]) {
  for (int v = 0; v < 2; ++v) {
    const Bytes packed = load_bytes(p + v * kVector);
    w[4 * v] = and_mask(packed, 3);
    w[4 * v + 1] = and_mask(shift_right<2>(packed), 3);
    w[4 * v + 2] = and_mask(shift_right<4>(packed), 3);
    w[4 * v + 3] = and_mask(shift_right<6>(packed), 3);
  }
}

inline void load_three(const uint8_t* p, Bytes w[8]) {
  load_pairs(p, w);
  const Bytes third = load_bytes(p + 2 * kVector);
  w[0] = merge(w[0], shift_left<2>(third), 4);
  w[1] = merge(w[1], shift_left<1>(third), 4);
  w[2] = merge(w[2], third, 4);
  w[3] = merge(w[3], shift_right<1>(third), 4);
  w[4] = merge(w[4], shift_right<2>(third), 4);
  w[5] = merge(w[5], shift_right<3>(third), 4);
  w[6] = merge(w[6], shift_right<4>(third), 4);
  w[7] = merge(w[7], shift_right<5>(third), 4);
}

inline void load_nibbles(const uint8_t* p, Bytes w[8]) {
  for (int v = 0; v < 4; ++v) {
    const Bytes packed = load_bytes(p + v * kVector);
    w[v] = and_mask(packed, 15);
    w[v + 4] = and_mask(shift_right<4>(packed), 15);
  }
}

inline void load_five(const uint8_t* p, Bytes w[8]) {
  load_nibbles(p, w);
  const Bytes fifth = load_bytes(p + 4 * kVector);
  w[0] = merge(w[0], shift_left<4>(fifth), 16);
  w[1] = merge(w[1], shift_left<3>(fifth), 16);
  w[2] = merge(w[2], shift_left<2>(fifth), 16);
  w[3] = merge(w[3], shift_left<1>(fifth), 16);
  w[4] = merge(w[4], fifth, 16);
  w[5] = merge(w[5], shift_right<1>(fifth), 16);
  w[6] = merge(w[6], shift_right<2>(fifth), 16);
  w[7] = merge(w[7], shift_right<3>(fifth), 16);
}

inline void load_six(const uint8_t* p, Bytes w[8]) {
  load_nibbles(p, w);
  for (int v = 0; v < 2; ++v) {
    const Bytes top = load_bytes(p + (4 + v) * kVector);
    w[4 * v] = merge(w[4 * v], shift_left<4>(top), 48);
    w[4 * v + 1] = merge(w[4 * v + 1], shift_left<2>(top), 48);
    w[4 * v + 2] = merge(w[4 * v + 2], top, 48);
    w[4 * v + 3] = merge(w[4 * v + 3], shift_right<2>(top), 48);
  }
}

inline void load_eight(const uint8_t* p, Bytes w[8]) {
  for (int q = 0; q < 8; ++q) w[q] = load_bytes(p + q * kVector);
}

template <const Layout& kLayout>
inline void load_group(const uint8_t* block, int group, Bytes w[8]) {
  const uint8_t* p = block + kLayout.header + group * kLayout.group_bytes;
  if constexpr (kLayout.planes == Planes::kPairs) load_pairs(p, w);
  if constexpr (kLayout.planes == Planes::kThree) load_three(p, w);
  if constexpr (kLayout.planes == Planes::kNibbles) load_nibbles(p, w);
  if constexpr (kLayout.planes == Planes::kFive) load_five(p, w);
  if constexpr (kLayout.planes == Planes::kSix) load_six(p, w);
  if constexpr (kLayout.planes == Planes::kBytes) load_eight(p, w);
}

// Loads the weights of a group as they are multiplied; `panel` is the start of the block's panel.
template <class Format>
inline void load_weights(const uint8_t* panel, const uint8_t* block, int group, Bytes w[8]) {
  load_group<Format::kLayout>(block, group, w);
  if constexpr (Format::kLayout.has_levels)
    for (int q = 0; q < 8; ++q) w[q] = look_up(panel + kVector, w[q]);
}

// Index of a group's scale within its block, or of the first of two.
template <class Format>
constexpr int scale_of(int group) {
  return Format::kLayout.groups == 0 ? 0 : Format::kHalfGroups ? 2 * group : group;
}

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: float16 scales (and minima) per group of 32 columns.
template <const Layout& kTheLayout>
struct Legacy {
  static constexpr const Layout& kLayout = kTheLayout;
  static constexpr bool kMinima = kLayout.offset_shift < 0;
  static constexpr bool kHalfGroups = false;
  using BlockScales = Scales<1, 1>;

  static void load_scales(const uint8_t* block, BlockScales& out) {
    store_floats(out.scale[0], load_half(block));
    if constexpr (kMinima) store_floats(out.minimum[0], load_half(block + kHalves));
  }
};

// Unpacks 256 six-bit numbers from 192 bytes.
inline void load_six_bits(const uint8_t* packed, uint8_t numbers[4 * kVector]) {
  const Bytes a = load_bytes(packed), b = load_bytes(packed + kVector), c = load_bytes(packed + 2 * kVector);
  store_bytes(numbers, and_mask(a, 63));
  store_bytes(numbers + kVector, and_mask(b, 63));
  store_bytes(numbers + 2 * kVector, and_mask(c, 63));
  const Bytes low = and_mask(shift_right<6>(a), 3);
  store_bytes(numbers + 3 * kVector, merge(merge(low, shift_right<4>(b), 12), shift_right<2>(c), 48));
}

// Q4_K, Q5_K: eight groups with six-bit scales and minima, in units of two float16 per row.
template <const Layout& kTheLayout>
struct SixBitScales {
  static constexpr const Layout& kLayout = kTheLayout;
  static constexpr bool kMinima = true;
  static constexpr bool kHalfGroups = false;
  using BlockScales = Scales<8, 8>;

  static void load_scales(const uint8_t* block, BlockScales& out) {
    alignas(64) uint8_t numbers[4 * kVector];
    load_six_bits(block + 2 * kHalves, numbers);
    const Floats unit = load_half(block), minimum_unit = sub(zero_floats(), load_half(block + kHalves));
    for (int g = 0; g < 8; ++g) {
      store_floats(out.scale[g], mul(unit, load_uint8(numbers + g * 32)));
      store_floats(out.minimum[g], mul(minimum_unit, load_uint8(numbers + g * 32 + 16)));
    }
  }
};

// Q2_K: four-bit scales and minima per 16 columns, in units of two float16 per row.
struct Q2K {
  static constexpr const Layout& kLayout = kQ2_K;
  static constexpr bool kMinima = true;
  static constexpr bool kHalfGroups = true;
  using BlockScales = Scales<16, 16>;

  static void load_scales(const uint8_t* block, BlockScales& out) {
    alignas(64) uint8_t scales[kVector], minima[kVector];
    const Floats unit = load_half(block), minimum_unit = sub(zero_floats(), load_half(block + kHalves));
    for (int v = 0; v < 4; ++v) {
      const Bytes packed = load_bytes(block + 2 * kHalves + v * kVector);
      store_bytes(scales, and_mask(packed, 15));
      store_bytes(minima, and_mask(shift_right<4>(packed), 15));
      for (int g = 0; g < 4; ++g) {
        store_floats(out.scale[4 * v + g], mul(unit, load_uint8(scales + g * kPanelRows)));
        store_floats(out.minimum[4 * v + g], mul(minimum_unit, load_uint8(minima + g * kPanelRows)));
      }
    }
  }
};

// Q3_K: six-bit scales per 16 columns, stored plus 32, in units of one float16 per row.
struct Q3K {
  static constexpr const Layout& kLayout = kQ3_K;
  static constexpr bool kMinima = false;
  static constexpr bool kHalfGroups = true;
  using BlockScales = Scales<16, 1>;

  static void load_scales(const uint8_t* block, BlockScales& out) {
    alignas(64) uint8_t numbers[4 * kVector];
    load_six_bits(block + kHalves, numbers);
    const Floats unit = load_half(block), offset = broadcast(32.0f);
    for (int g = 0; g < 16; ++g)
      store_floats(out.scale[g], mul(unit, sub(load_uint8(numbers + g * kPanelRows), offset)));
  }
};

// Q6_K: int8 scales per 16 columns, in units of one float16 per row.
struct Q6K {
  static constexpr const Layout& kLayout = kQ6_K;
  static constexpr bool kMinima = false;
  static constexpr bool kHalfGroups = true;
  using BlockScales = Scales<16, 1>;

  static void load_scales(const uint8_t* block, BlockScales& out) {
    const Floats unit = load_half(block);
    for (int g = 0; g < 16; ++g) store_floats(out.scale[g], mul(unit, load_int8(block + kHalves + g * kPanelRows)));
  }
};

// Grouped codes with minima: one group of columns per block.
template <const Layout& kTheLayout>
struct Grouped {
  static constexpr const Layout& kLayout = kTheLayout;
  static constexpr bool kMinima = true;
  static constexpr bool kHalfGroups = false;
  using BlockScales = Scales<1, 1>;

  static void load_scales(const uint8_t* panel, const uint8_t* block, BlockScales& out) {
    const Floats scale = mul(load_half(block), load_floats(reinterpret_cast<const float*>(panel)));
    const Floats unit = load_floats(reinterpret_cast<const float*>(panel + kVector));
    const Floats factor = choose_greater(unit, zero_floats(), unit, scale);
    store_floats(out.scale[0], scale);
    store_floats(out.minimum[0], mul(load_half(block + kHalves), factor));
  }
};

// Codes that index levels: one group of columns per block, or two of 16.
template <const Layout& kTheLayout>
struct Levels {
  static constexpr const Layout& kLayout = kTheLayout;
  static constexpr bool kMinima = false;
  static constexpr bool kHalfGroups = kLayout.groups == 1;
  using BlockScales = Scales<2, 1>;

  static void load_scales(const uint8_t* panel, const uint8_t* block, BlockScales& out) {
    const Floats unit = load_floats(reinterpret_cast<const float*>(panel));
    store_floats(out.scale[0], mul(load_half(block), unit));
    if constexpr (kHalfGroups) store_floats(out.scale[1], mul(load_half(block + kHalves), unit));
  }
};

template <class Format>
inline void load_scales(const uint8_t* panel, const uint8_t* block, typename Format::BlockScales& out) {
  if constexpr (Format::kLayout.panel_header > 0) {
    Format::load_scales(panel, block, out);
  } else {
    Format::load_scales(block, out);
  }
}

template <class Take>
inline auto with_grouped(int32_t format, const Take& take) {
  switch (grouped_kind(format)) {
    case PAGED_GROUPED_2:
      return take(Grouped<kGrouped2>{});
    case PAGED_GROUPED_3:
      return take(Grouped<kGrouped3>{});
    case PAGED_GROUPED_4:
      return take(Grouped<kGrouped4>{});
    case PAGED_GROUPED_5:
      return take(Grouped<kGrouped5>{});
    case PAGED_GROUPED_6:
      return take(Grouped<kGrouped6>{});
    case PAGED_GROUPED_8:
      return take(Grouped<kGrouped8>{});
    case PAGED_GROUPED_LEVELS:
      return take(Levels<kLevels>{});
    default:
      return take(Levels<kLevelsOf16>{});
  }
}

// Calls take(Format{}) for a packed format, which was validated when the weight was packed.
template <class Take>
inline auto with_format(int32_t format, const Take& take) {
  if (is_grouped(format)) return with_grouped(format, take);
  switch (format) {
    case PAGED_Q4_0:
      return take(Legacy<kQ4_0>{});
    case PAGED_Q4_1:
      return take(Legacy<kQ4_1>{});
    case PAGED_Q5_0:
      return take(Legacy<kQ5_0>{});
    case PAGED_Q5_1:
      return take(Legacy<kQ5_1>{});
    case PAGED_Q8_0:
      return take(Legacy<kQ8_0>{});
    case PAGED_Q2_K:
      return take(Q2K{});
    case PAGED_Q3_K:
      return take(Q3K{});
    case PAGED_Q4_K:
      return take(SixBitScales<kQ4_K>{});
    case PAGED_Q5_K:
      return take(SixBitScales<kQ5_K>{});
    default:
      return take(Q6K{});
  }
}

}  // namespace
}  // namespace paged
