// Quantizes floating point weights to GGUF blocks.
//
// Sixteen groups of 16 or 32 weights are fitted at a time, one per lane. A fit tries some twenty roundings of a group
// and solves least squares for the scale (and minimum) of each; the smallest squared error wins. If columns have an
// importance, it weights their squared errors: `w` holds each weight's importance, and is not read otherwise.
#pragma once

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "simd.h"

namespace paged {
namespace {

constexpr int kLanes = 16;
constexpr float kTiny = 1e-30f;  // smaller ranges count as zero, since their inverse would overflow
constexpr float kNoise = 1e-5f;  // relative to sums of 32 products: some five times their rounding error

inline Floats clamp(Floats a, float lowest, float highest) {
  return minimum(broadcast(highest), maximum(broadcast(lowest), a));
}
// a / b, or 0 where b is not positive
inline Floats ratio(Floats a, Floats b) {
  return choose_greater(b, zero_floats(), div(a, maximum(broadcast(kTiny), b)), zero_floats());
}

// x ~ scale * code + minimum, lane by lane.
struct Fit {
  Floats scale;
  Floats minimum;
};

// 1 / a, or 0 where a is 0
inline Floats inverse_of(Floats a) {
  return sub(ratio(broadcast(1.0f), a), ratio(broadcast(1.0f), sub(zero_floats(), a)));
}

inline Floats nearest_code(Floats x, Floats offset, Floats inverse, float lowest, float highest) {
  return clamp(round_to_integral(mul(sub(x, offset), inverse)), lowest, highest);
}

// Sums for least squares over the codes nearest to (x - offset) * inverse.
struct CodeSums {
  Floats q, qq, xq;
};

template <int kCount, bool kWeighted>
inline CodeSums code_sums(const Floats x[kCount], const Floats w[kCount], Floats offset, Floats inverse, float lowest,
                          float highest) {
  CodeSums sums{zero_floats(), zero_floats(), zero_floats()};
  for (int i = 0; i < kCount; ++i) {
    const Floats q = nearest_code(x[i], offset, inverse, lowest, highest);
    const Floats wq = kWeighted ? mul(w[i], q) : q;
    sums.q = add(sums.q, wq);
    // Not fused, so that every ISA level and kernels/quantized/quantize.py find the same scales.
    sums.qq = add(sums.qq, mul(wq, q));
    sums.xq = add(sums.xq, mul(x[i], wq));
  }
  return sums;
}

// Sums of the importance, and of x weighted by it.
struct Totals {
  Floats w, x;
};

template <int kCount, bool kWeighted>
inline Totals totals_of(const Floats x[kCount], const Floats w[kCount]) {
  Totals totals{kWeighted ? zero_floats() : broadcast(static_cast<float>(kCount)), zero_floats()};
  for (int i = 0; i < kCount; ++i) {
    if (kWeighted) totals.w = add(totals.w, w[i]);
    totals.x = add(totals.x, kWeighted ? mul(w[i], x[i]) : x[i]);
  }
  return totals;
}

// Fits codes 0 ... levels with a scale and a minimum. A K format's minimum is never positive.
template <int kSize, bool kWeighted>
inline Fit fit_affine(const Floats x[kSize], const Floats w[kSize], float levels, bool is_k) {
  Floats lowest = x[0], highest = x[0];
  for (int i = 0; i < kSize; ++i) {
    lowest = minimum(lowest, x[i]);
    highest = maximum(highest, x[i]);
  }
  const Totals total = totals_of<kSize, kWeighted>(x, w);
  const auto shared = [&total](Floats sum) {  // kSize is a power of two
    return kWeighted ? ratio(sum, total.w) : mul(sum, broadcast(1.0f / kSize));
  };
  if (is_k) lowest = minimum(lowest, zero_floats());
  const Floats range = maximum(sub(highest, lowest), broadcast(kTiny));
  const Floats mean = shared(total.x);
  Fit best{zero_floats(), is_k ? minimum(mean, zero_floats()) : mean};
  Floats most = broadcast(-1.0f);  // the largest reduction of the sum of squares so far
  const auto attempt = [&](Floats offset, Floats inverse) {
    const CodeSums sums = code_sums<kSize, kWeighted>(x, w, offset, inverse, 0.0f, levels);
    const Floats squares = mul(total.w, sums.qq);
    Floats determinant = sub(squares, mul(sums.q, sums.q));
    // If all codes are equal, the weighted determinant is only rounding error; without weights, sums of codes are
    // exact.
    if (kWeighted)
      determinant = choose_greater(determinant, mul(broadcast(kNoise), squares), determinant, zero_floats());
    Fit fit;
    fit.scale = ratio(sub(mul(total.w, sums.xq), mul(total.x, sums.q)), determinant);
    fit.minimum = shared(sub(total.x, mul(fit.scale, sums.q)));
    // If the minimum would be positive but must not be, only the scale is fitted.
    const Floats alone = ratio(sums.xq, sums.qq);
    const Floats below = is_k ? sub(zero_floats(), fit.minimum) : zero_floats();
    fit.minimum = choose_greater(zero_floats(), below, zero_floats(), fit.minimum);
    fit.scale = choose_greater(zero_floats(), below, alone, fit.scale);
    const Floats gain = add(mul(fit.scale, sums.xq), mul(fit.minimum, total.x));
    best.scale = choose_greater(gain, most, fit.scale, best.scale);
    best.minimum = choose_greater(gain, most, fit.minimum, best.minimum);
    most = choose_greater(gain, most, gain, most);
  };
  for (int step = -10; step <= 10; ++step)
    attempt(lowest, div(broadcast(levels + 0.1f * static_cast<float>(step)), range));
  // Refine: fit again to the codes nearest to the best fit.
  for (int again = 0; again < 3; ++again) attempt(best.minimum, inverse_of(best.scale));
  return best;
}

// Fits codes -half ... half - 1 with a scale. The weight furthest from zero is tried near -half.
template <int kCount, bool kWeighted>
inline Fit fit_symmetric(const Floats x[kCount], const Floats w[kCount], float half) {
  Floats lowest = x[0], highest = x[0];
  for (int i = 0; i < kCount; ++i) {
    lowest = minimum(lowest, x[i]);
    highest = maximum(highest, x[i]);
  }
  const Floats magnitude = maximum(maximum(highest, sub(zero_floats(), lowest)), broadcast(kTiny));
  const Floats sign = choose_greater(add(lowest, highest), zero_floats(), broadcast(-1.0f), broadcast(1.0f));
  Fit best{zero_floats(), zero_floats()};
  Floats most = zero_floats();
  for (int step = -10; step <= 10; ++step) {
    const Floats inverse = mul(sign, div(broadcast(half + 0.1f * static_cast<float>(step)), magnitude));
    const CodeSums sums = code_sums<kCount, kWeighted>(x, w, zero_floats(), inverse, -half, half - 1.0f);
    const Floats scale = ratio(sums.xq, sums.qq), gain = mul(scale, sums.xq);
    best.scale = choose_greater(gain, most, scale, best.scale);
    most = choose_greater(gain, most, gain, most);
  }
  return best;
}

// Writes the nearest codes in [lowest, highest], minus `lowest`, to codes[lane][kCount].
template <int kCount>
inline void encode(const Floats x[kCount], const Fit& fit, float lowest, float highest, uint8_t* codes) {
  const Floats inverse = inverse_of(fit.scale);
  for (int first = 0; first < kCount; first += 16) {
    Floats q[16];
    for (int i = 0; i < 16; ++i) {
      const Floats code = nearest_code(x[first + i], fit.minimum, inverse, lowest, highest);
      q[i] = sub(code, broadcast(lowest));
    }
    transpose(q);
    for (int lane = 0; lane < kLanes; ++lane) store_uint8(codes + lane * kCount + first, to_nearest(q[lane]));
  }
}

// Loads sixteen groups of kCount weights from `col` on, one group per lane, padded with zeros past the row's end.
// Returns the bits of the largest magnitude.
template <int kCount>
inline uint32_t load_groups(const paged_quantize_args& args, int64_t row, int col, Floats out[kCount]) {
  Ints largest = zero_ints();
  for (int first = 0; first < kCount; first += 16) {
    Floats lanes[16];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int c = col + lane * kCount + first;
      const int64_t at = row * args.x_stride + c;
      lanes[lane] = c >= args.cols                 ? zero_floats()
                    : args.dtype == PAGED_FLOAT32  ? load_floats(static_cast<const float*>(args.x) + at)
                    : args.dtype == PAGED_BFLOAT16 ? load_bfloat16(static_cast<const uint16_t*>(args.x) + at)
                                                   : load_half(static_cast<const uint8_t*>(args.x) + 2 * at);
      largest = max_magnitude(largest, lanes[lane]);
    }
    transpose(lanes);
    for (int i = 0; i < 16; ++i) out[first + i] = lanes[i];
  }
  return static_cast<uint32_t>(max_of(largest));
}

// Loads the importance of sixteen groups' columns, in the order of load_groups.
template <int kCount>
inline void load_importance(const paged_quantize_args& args, int col, Floats out[kCount]) {
  for (int first = 0; first < kCount; first += 16) {
    Floats lanes[16];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int c = col + lane * kCount + first;
      lanes[lane] = c < args.cols ? load_floats(args.importance + c) : zero_floats();
    }
    transpose(lanes);
    for (int i = 0; i < 16; ++i) out[first + i] = lanes[i];
  }
}

// The scales of sixteen groups, as blocks store them.
struct LaneScales {
  alignas(64) float scale[kLanes];
  alignas(64) float minimum[kLanes];

  explicit LaneScales(const Fit& fit) {
    store_floats(scale, fit.scale);
    store_floats(minimum, fit.minimum);
  }
  Fit fit() const { return {load_floats(scale), load_floats(minimum)}; }
};

// Quantizes groups of 32 with float16 scales (and minima).
template <bool kWeighted>
inline void quantize_legacy(const BlockForm& form, const Floats x[kGroup], const Floats w[kGroup], int num_groups,
                            uint8_t* out) {
  const bool affine = form.layout->offset_shift < 0;
  const float levels = static_cast<float>(form.levels), half = (levels + 1.0f) / 2.0f;
  LaneScales lanes(affine ? fit_affine<kGroup, kWeighted>(x, w, levels, false)
                          : fit_symmetric<kGroup, kWeighted>(x, w, half));
  Block blocks[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    blocks[i].unit = to_half(lanes.scale[i]);
    blocks[i].minimum = to_half(lanes.minimum[i]);
    lanes.scale[i] = half_to_float(blocks[i].unit);
    lanes.minimum[i] = half_to_float(blocks[i].minimum);
  }
  uint8_t codes[kLanes * kGroup];
  encode<kGroup>(x, lanes.fit(), affine ? 0.0f : -half, affine ? levels : half - 1.0f, codes);
  for (int i = 0; i < num_groups; ++i) {
    std::memcpy(blocks[i].q, codes + i * kGroup, kGroup);
    form.write(blocks[i], out + i * form.block_bytes);
  }
}

// Refits a block's units by least squares over the weights' codes, given the integer scales and minima of its kGroups
// groups; `first` is the block's first lane.
template <int kGroups>
inline void refit_units(const float (&sums)[5][kLanes], int first, Block& block) {
  double aa = 0.0, ab = 0.0, bb = 0.0, ax = 0.0, bx = 0.0;  // x ~ unit * a - minimum * b
  for (int g = 0; g < kGroups; ++g) {
    const double scale = block.scales[g], least = block.minima[g];
    aa += scale * scale * sums[1][first + g];
    ab += scale * least * sums[0][first + g];
    bb += least * least * sums[4][first + g];
    ax += scale * sums[2][first + g];
    bx += least * sums[3][first + g];
  }
  const double determinant = aa * bb - ab * ab;
  const double unit = determinant > 0.0 ? (ax * bb - ab * bx) / determinant : aa > 0.0 ? ax / aa : 0.0;
  const double minimum = determinant > 0.0 ? (ab * ax - aa * bx) / determinant : 0.0;
  if (unit < 0.0 || minimum < 0.0 || (determinant <= 0.0 && bb > 0.0)) return;  // keep the first units
  block.unit = to_half(static_cast<float>(unit));
  block.minimum = to_half(static_cast<float>(minimum));
}

// Quantizes blocks of kGroups groups whose scales and minima are integers up to `most`: 63 with eight groups of 32, 15
// with sixteen groups of 16.
template <int kGroups, bool kWeighted>
inline void quantize_small_scales(const BlockForm& form, const Floats* x, const Floats* w, float most, int num_groups,
                                  uint8_t* out) {
  constexpr int kSize = 256 / kGroups, kBlocks = kLanes / kGroups;
  const float levels = static_cast<float>(form.levels);
  LaneScales lanes(fit_affine<kSize, kWeighted>(x, w, levels, true));
  Block blocks[kBlocks];
  const auto small = [most](float value, uint16_t unit) {
    const float of = half_to_float(unit);
    return static_cast<uint8_t>(of > 0.0f ? std::min(most, __builtin_floorf(value / of + 0.5f)) : 0.0f);
  };
  const auto apply = [&lanes](const Block& block, int first) {
    for (int g = 0; g < kGroups; ++g) {
      lanes.scale[first + g] = half_to_float(block.unit) * static_cast<float>(block.scales[g]);
      lanes.minimum[first + g] = -half_to_float(block.minimum) * static_cast<float>(block.minima[g]);
    }
  };
  for (int b = 0; b < kBlocks; ++b) {
    const float* scales = lanes.scale + kGroups * b;
    const float* minima = lanes.minimum + kGroups * b;
    blocks[b].unit = to_half(*std::max_element(scales, scales + kGroups) / most);
    blocks[b].minimum = to_half(-*std::min_element(minima, minima + kGroups) / most);
    for (int g = 0; g < kGroups; ++g) {
      blocks[b].scales[g] = small(scales[g], blocks[b].unit);
      blocks[b].minima[g] = small(-minima[g], blocks[b].minimum);
    }
    apply(blocks[b], kGroups * b);
  }
  const Fit rounded = lanes.fit();
  const CodeSums codes_sums =
      code_sums<kSize, kWeighted>(x, w, rounded.minimum, inverse_of(rounded.scale), 0.0f, levels);
  const Totals total = totals_of<kSize, kWeighted>(x, w);
  alignas(64) float sums[5][kLanes];
  store_floats(sums[0], codes_sums.q);
  store_floats(sums[1], codes_sums.qq);
  store_floats(sums[2], codes_sums.xq);
  store_floats(sums[3], total.x);
  store_floats(sums[4], total.w);
  for (int b = 0; b < kBlocks; ++b) {
    refit_units<kGroups>(sums, kGroups * b, blocks[b]);
    apply(blocks[b], kGroups * b);
  }
  uint8_t codes[kLanes * kSize];
  encode<kSize>(x, lanes.fit(), 0.0f, levels, codes);
  for (int b = 0; b < num_groups / kGroups; ++b) {
    std::memcpy(blocks[b].q, codes + b * 256, 256);
    form.write(blocks[b], out + b * form.block_bytes);
  }
}

// Quantizes a block of sixteen groups of 16 with signed scales lowest ... -lowest - 1, stored plus `offset`; the
// largest magnitude maps to `lowest`.
template <bool kWeighted>
inline void quantize_signed_scales(const BlockForm& form, const Floats x[16], const Floats w[16], float lowest,
                                   int offset, uint8_t* out) {
  const float half = (static_cast<float>(form.levels) + 1.0f) / 2.0f;
  LaneScales lanes(fit_symmetric<16, kWeighted>(x, w, half));
  const float largest = *std::max_element(lanes.scale, lanes.scale + kLanes,
                                          [](float a, float b) { return __builtin_fabsf(a) < __builtin_fabsf(b); });
  Block block;
  block.unit = to_half(largest / lowest);
  const float unit = half_to_float(block.unit);
  for (int i = 0; i < kLanes; ++i) {
    const float code = unit != 0.0f ? __builtin_floorf(lanes.scale[i] / unit + 0.5f) : 0.0f;
    const auto scale = static_cast<int>(std::min(-lowest - 1.0f, std::max(lowest, code)));
    block.scales[i] = static_cast<uint8_t>(scale + offset);
    lanes.scale[i] = unit * static_cast<float>(scale);
  }
  encode<16>(x, lanes.fit(), -half, half - 1.0f, block.q);
  form.write(block, out);
}

template <bool kWeighted>
inline bool quantize_row_to_blocks(const paged_quantize_args& args, const BlockForm& form, int64_t row, uint8_t* out) {
  constexpr float kLargest = 32768.0f;
  const bool groups_of_16 = form.layout->planes == Planes::kPairs || form.layout->planes == Planes::kThree ||
                            form.layout->planes == Planes::kSix;
  const int group = groups_of_16 ? 16 : kGroup, groups_per_block = form.layout->groups * kGroup / group;
  for (int col = 0; col < args.cols; col += kLanes * group) {
    const int num_groups = std::min((args.cols - col) / group, kLanes);
    Floats x[kGroup], w[kGroup];
    const uint32_t bits = groups_of_16 ? load_groups<16>(args, row, col, x) : load_groups<kGroup>(args, row, col, x);
    if (!(from_bits(bits) <= kLargest)) return false;
    if (kWeighted) groups_of_16 ? load_importance<16>(args, col, w) : load_importance<kGroup>(args, col, w);
    uint8_t* blocks = out + static_cast<int64_t>(col / group / groups_per_block) * form.block_bytes;
    if (args.format == PAGED_Q2_K) {
      quantize_small_scales<16, kWeighted>(form, x, w, 15.0f, num_groups, blocks);
    } else if (args.format == PAGED_Q3_K) {
      quantize_signed_scales<kWeighted>(form, x, w, -32.0f, 32, blocks);
    } else if (args.format == PAGED_Q6_K) {
      quantize_signed_scales<kWeighted>(form, x, w, -128.0f, 0, blocks);
    } else if (groups_per_block == 1) {
      quantize_legacy<kWeighted>(form, x, w, num_groups, blocks);
    } else {
      quantize_small_scales<8, kWeighted>(form, x, w, 63.0f, num_groups, blocks);
    }
  }
  return true;
}

// Quantizes one row. Returns false if the row contains NaN, Inf, or a number so large that its scale could overflow
// float16.
inline bool quantize_weights(const paged_quantize_args& args, const BlockForm& form, int64_t row, uint8_t* out) {
  return args.importance != nullptr ? quantize_row_to_blocks<true>(args, form, row, out)
                                    : quantize_row_to_blocks<false>(args, form, row, out);
}

}  // namespace
}  // namespace paged
