// Makes int8 codes of a packed panel's Hadamard transform during a product with many rows: weights are stored once, at
// the file's own bits, and the codes stay in a thread's cache.
//
// The transform runs over groups of 32 columns, which share a scale in every format but Q2_K, Q3_K, Q6_K and levels per
// 16 columns, so it works on small integers and is exact. Rounded are only the codes, and a group's factor relative to
// its block, to 15 bits. Everything is integer arithmetic except one factor per row and group, so every ISA level makes
// the same codes.
#pragma once

#include "formats.h"
#include "matrix_unit.h"

namespace paged {
namespace {

// Columns of codes, padded with zeros to a multiple of kCodesTogether.
constexpr int code_cols(int cols) { return (cols + kCodesTogether - 1) / kCodesTogether * kCodesTogether; }

// Codes of one panel: one vector per quad, stored plus 128 except for AMX, and 16 scales per block of columns.
struct HadamardPanel {
  uint8_t* codes;
  float* scales;

  static constexpr int64_t bytes(int cols) {
    return static_cast<int64_t>(code_cols(cols)) * kPanelRows + static_cast<int64_t>(scale_blocks(cols)) * kVector;
  }
  static HadamardPanel at(uint8_t* memory, int cols) {
    return {memory, reinterpret_cast<float*>(memory + static_cast<int64_t>(code_cols(cols)) * kPanelRows)};
  }
};

// The coefficients of a group of 32 columns: for quad q, numbers 0 and 2 of each row in [q][0], 1 and 3 in [q][1].
struct Coefficients {
  alignas(64) int16_t quad[8][2][2 * kPanelRows];
};

// Scale of the transform's coefficients: weights of kBits bits, minus 2^(kBits - 1), become coefficients of up to 2^14.
// Weights of 2 and 3 bits reach only 2^12 and 2^13, because bytes are multiplied by at most 127.
template <class Format>
constexpr int kCoefficientUnit = Format::kLayout.bits() > 4 ? 1 << (10 - Format::kLayout.bits()) : 64;

// The offset that makes weights signed.
template <class Format>
constexpr int kCentre = 1 << (Format::kLayout.bits() - 1);

// Replaces w[i], w[i + kStride] by their sum and difference.
template <int kStride>
[[gnu::always_inline]] inline void butterfly_quads(Bytes w[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if ((i & kStride) == 0) {
      const Bytes a = w[i], b = w[i + kStride];
      w[i] = add_bytes(a, b);
      w[i + kStride] = sub_bytes(a, b);
    }
  }
}

template <int kStride>
[[gnu::always_inline]] inline void butterfly_quads(Shorts v[8][2]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if ((i & kStride) == 0) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const Shorts a = v[i][j], b = v[i + kStride][j];
        v[i][j] = add_shorts(a, b);
        v[i + kStride][j] = sub_shorts(a, b);
      }
    }
  }
}

// Transforms a group. The first stages add bytes, as long as sums fit. `halves` are factors of a group's two halves in
// units of 2^-15, for formats with a scale per half group.
template <class Format>
[[gnu::always_inline]] inline void transform_group(Bytes w[8], const Shorts (&halves)[2], Shorts v[8][2]) {
  constexpr Planes kPlanes = Format::kLayout.numbers();
  constexpr int kUnit = kCoefficientUnit<Format>;
  constexpr bool kHalves = Format::kHalfGroups || kPlanes == Planes::kSix;  // sums of 4 numbers fit bytes, of 8 do not
  if constexpr (kPlanes == Planes::kBytes) {
    for (int q = 0; q < 8; ++q) widen<kUnit>(sub_byte(w[q], 128), v[q][0], v[q][1]);
    butterfly_quads<1>(v);
    butterfly_quads<2>(v);
  } else {
    butterfly_quads<1>(w);
    butterfly_quads<2>(w);
    if constexpr (kHalves) {
      w[0] = sub_byte(w[0], 4 * kCentre<Format>);
      w[4] = sub_byte(w[4], 4 * kCentre<Format>);
    } else {  // the sum of 8 five-bit weights wraps around until the offset is subtracted
      butterfly_quads<4>(w);
      w[0] = sub_byte(w[0], 8 * kCentre<Format>);
    }
    for (int q = 0; q < 8; ++q)
      widen<kUnit>(kPlanes == Planes::kNibbles ? butterfly_bytes(w[q]) : w[q], v[q][0], v[q][1]);
  }
  if constexpr (kPlanes != Planes::kNibbles)
    for (int q = 0; q < 8; ++q)
      for (int j = 0; j < 2; ++j) v[q][j] = butterfly_shorts(v[q][j]);
  if constexpr (Format::kHalfGroups)
    for (int q = 0; q < 8; ++q)
      for (int j = 0; j < 2; ++j) v[q][j] = multiply_high(v[q][j], halves[q / 4]);
  if constexpr (kPlanes == Planes::kBytes || kHalves) butterfly_quads<4>(v);
}

// Returns one scale for a group with two half-group scales: the larger of them, and the factors of both halves in units
// of 2^-15. NaN counts as the larger.
inline Floats common_scale(const float* low, const float* high, Shorts (&halves)[2]) {
  const Floats a = load_floats(low), b = load_floats(high);
  const Floats larger = as_floats(max_magnitude(max_magnitude(zero_ints(), a), b));
  const Floats inverse =
      choose_greater(larger, zero_floats(), div(broadcast(32767.0f), larger), zero_floats());
  halves[0] = twice(to_nearest(mul(a, inverse)));
  halves[1] = twice(to_nearest(mul(b, inverse)));
  return larger;
}

// Makes the codes of a panel.
template <class Format>
void make_hadamard_panel(const uint8_t* panel, const paged_weight& weight, const HadamardPanel& out) {
  constexpr const Layout& kLayout = Format::kLayout;
  constexpr int kUnit = kCoefficientUnit<Format>;
  // The scale of a block of codes includes 1 / 32 for the transforms of weights and activations.
  constexpr float kScale = 1.0f / (127.0f * kUnit * kGroup);
  Coefficients coefficients[kScaleGroups];
  // Coefficients that minima contribute to: the first of a group, or the first of each of its two halves' sum and
  // difference.
  constexpr int kConstants = !Format::kMinima ? 0 : Format::kHalfGroups ? 2 : 1;
  Floats scale[kScaleGroups], constant[kScaleGroups][2];
  typename Format::BlockScales scales;
  constexpr float kSmallest = 1e-30f, kLargest = 3e38f;
  uint8_t* codes = out.codes;
  float* scales_out = out.scales;
  const uint8_t* block = panel + kLayout.panel_header;
  const int cols = weight.cols, block_groups = kLayout.block_groups(weight.format);
  int in_block = 0;
  for (int first = 0; first < cols / kGroup; first += kScaleGroups) {
    const int groups = cols / kGroup - first < kScaleGroups ? cols / kGroup - first : kScaleGroups;
    Ints largest = zero_ints();
    for (int g = 0; g < groups; ++g) {
      if (in_block == 0) load_scales<Format>(panel, block, scales);
      const int at = scale_of<Format>(in_block);
      for (int line = 0; line < kLayout.group_bytes; line += 64)
        __builtin_prefetch(block + kLayout.header + in_block * kLayout.group_bytes + line + 2048);
      Shorts halves[2];
      if constexpr (Format::kHalfGroups) {
        scale[g] = common_scale(scales.scale[at], scales.scale[at + 1], halves);
      } else {
        scale[g] = load_floats(scales.scale[at]);
      }
      Bytes w[8];
      load_weights<Format>(panel, block, in_block, w);
      Shorts v[8][2];
      transform_group<Format>(w, halves, v);
      // At least 128, so that a factor fits 16 bits whatever the weights are.
      Shorts most = broadcast_short(128);
      for (int q = 0; q < 8; ++q) {
        for (int j = 0; j < 2; ++j) {
          store_shorts(coefficients[g].quad[q][j], v[q][j]);
          if (q % 4 == 0 && q / 4 < kConstants && j == 0) {
            most = max_magnitude_short(most, replace_first(v[q][0], zero_ints()));
          } else {
            most = max_magnitude_short(most, v[q][j]);
          }
        }
      }
      largest = max_magnitude(largest, mul(to_floats(larger_of_two(most)), scale[g]));
      if constexpr (kConstants > 0) {
        const Floats centre = broadcast(kLayout.offset_shift < 0 ? static_cast<float>(kCentre<Format>) : 0.0f);
        const auto minimum_of = [&](int i) {
          return fma(load_floats(scales.scale[i]), centre, load_floats(scales.minimum[i]));
        };
        Floats sums[2];
        if constexpr (Format::kHalfGroups) {
          const Floats a = minimum_of(at), b = minimum_of(at + 1);
          sums[0] = add(a, b);
          sums[1] = sub(a, b);
        } else {
          sums[0] = minimum_of(at);
        }
        for (int i = 0; i < kConstants; ++i) {
          constant[g][i] = add(mul(to_floats(first_of_two(v[4 * i][0])), scale[g]),
                               mul(sums[i], broadcast(static_cast<float>(kGroup / kConstants * kUnit))));
          largest = max_magnitude(largest, constant[g][i]);
        }
      }
      if (++in_block == block_groups) {
        in_block = 0;
        block += kLayout.header + block_groups * kLayout.group_bytes;
      }
    }
    // An Inf or NaN scale gives a scale of Inf or NaN and codes of zero, and so NaN products in that row only.
    const Floats most = as_floats(largest), unit = div(broadcast(127.0f), most);
    const auto codes_of = [&](Floats a) {
      const Floats finite = choose_greater(broadcast(kLargest), most, mul(a, unit), zero_floats());
      return to_nearest(choose_greater(most, broadcast(kSmallest), finite, zero_floats()));
    };
    keep_awake();
    store_floats(scales_out, mul(most, broadcast(kScale)));
    scales_out += kPanelRows;
    for (int g = 0; g < groups; ++g) {
      const Shorts factor = twice(codes_of(mul(scale[g], broadcast(32768.0f))));
      for (int q = 0; q < 8; ++q, codes += kVector) {
        Shorts even = multiply_high(load_shorts(coefficients[g].quad[q][0]), factor);
        const Shorts odd = multiply_high(load_shorts(coefficients[g].quad[q][1]), factor);
        if (q % 4 == 0 && q / 4 < kConstants) even = replace_first(even, codes_of(constant[g][q / 4]));
        store_bytes(codes, join_bytes(even, odd));
      }
    }
  }
}

inline void make_hadamard_panel(const paged_weight& weight, int64_t panel, const HadamardPanel& out) {
  with_format(weight.format, [&](auto of) {
    using Format = decltype(of);
    const uint8_t* data = weight.data + panel * Format::kLayout.panel_bytes(weight.format, weight.cols);
    make_hadamard_panel<Format>(data, weight, out);
  });
}

}  // namespace
}  // namespace paged
