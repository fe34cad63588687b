// Quantizes floating point weights to codes with one scale per 64 columns of a row (the last group may have 32), as
// kernels/quantized/quantize_groups.py defines it.
//
// Sixteen groups are fitted at a time, one per lane. Sums run over a group's weights in order, so every ISA level finds
// the same numbers; torch's sums have another order and now and then round differently.
#pragma once

#include <cmath>

#include "quantize.h"

namespace paged {
namespace {

constexpr int kGroupWeights = 64;  // weights that share a scale
constexpr int kLevelSteps = 15;    // midpoints between sixteen levels
constexpr float kSmallestStep = 1e-7f;

// Half-quadratic optimization: the norm of the error, the weight of the split, its growth per round, and the number of
// rounds.
constexpr float kNorm = 0.7f, kSplit = 10.0f, kGrowth = 1.01f;
constexpr int kRounds = 12;

inline Floats magnitude_of(Floats a) { return maximum(a, sub(zero_floats(), a)); }
inline Floats one_where_zero(Floats a) {
  return choose_greater(magnitude_of(a), zero_floats(), a, broadcast(1.0f));
}
inline Floats rounded_to_half(Floats a) {
  alignas(64) uint16_t halves[kLanes];
  store_half(halves, a);
  return load_half(reinterpret_cast<const uint8_t*>(halves));
}

template <int kCount>
struct Range {
  Floats lowest, highest;

  explicit Range(const Floats x[kCount]) : lowest(x[0]), highest(x[0]) {
    for (int i = 1; i < kCount; ++i) {
      lowest = minimum(lowest, x[i]);
      highest = maximum(highest, x[i]);
    }
  }
};

// Computes the codes of a fit; returns their squared error.
template <int kCount>
inline Floats affine_codes(const Floats x[kCount], const Fit& fit, float levels, Floats codes[kCount]) {
  const Floats scale = one_where_zero(fit.scale);
  Floats total = zero_floats();
  for (int i = 0; i < kCount; ++i) {
    const Floats nearest = round_to_integral(div(sub(x[i], fit.minimum), scale));
    codes[i] = clamp(nearest, 0.0f, levels);
    const Floats error = sub(add(mul(codes[i], fit.scale), fit.minimum), x[i]);
    total = add(total, mul(error, error));
  }
  return total;
}

// Fits so that the end of the range further from zero is exact and zero has a code; a least-squares fit to the
// resulting codes replaces it where its error is smaller.
template <int kCount>
inline Fit fit_edge(const Floats x[kCount], float levels, Floats codes[kCount]) {
  const Range<kCount> range(x);
  const Floats zero = zero_floats(), most = broadcast(levels);
  const Floats least_step = broadcast(kSmallestStep);
  const Floats positive = maximum(div(sub(range.highest, range.lowest), most), least_step);
  const Floats low = magnitude_of(range.lowest), high = magnitude_of(range.highest);
  const Floats edge = choose_greater(low, high, range.lowest, range.highest);
  const Floats step = choose_greater(low, high, positive, sub(zero, positive));
  const Floats place = round_to_integral(div(edge, step));  // number of steps from zero to the edge
  const Floats steps = magnitude_of(place);
  Fit fit;
  fit.scale = rounded_to_half(choose_greater(steps, zero, div(edge, one_where_zero(place)), step));
  fit.minimum = choose_greater(steps, most, rounded_to_half(edge), mul(fit.scale, place));
  const Floats error = affine_codes<kCount>(x, fit, levels, codes);

  Floats sum_codes = zero, sum_x = zero;
  for (int i = 0; i < kCount; ++i) {
    sum_codes = add(sum_codes, codes[i]);
    sum_x = add(sum_x, x[i]);
  }
  const Floats part = broadcast(1.0f / kCount), mean_code = mul(sum_codes, part), mean = mul(sum_x, part);
  Floats spread = zero, product = zero;
  for (int i = 0; i < kCount; ++i) {
    const Floats off = sub(codes[i], mean_code);
    spread = add(spread, mul(off, off));
    product = add(product, mul(off, x[i]));
  }
  const Floats slope = div(product, maximum(spread, broadcast(1.0f)));
  const Fit own{rounded_to_half(slope), rounded_to_half(sub(mean, mul(slope, mean_code)))};
  Floats own_codes[kCount];
  const Floats own_error = affine_codes<kCount>(x, own, levels, own_codes);
  // 1 where the second fit is better
  const Floats nearer = choose_greater(error, own_error, broadcast(1.0f), zero);
  const Floats taken = choose_greater(magnitude_of(own.scale), zero, nearer, zero);
  fit.scale = choose_greater(taken, zero, own.scale, fit.scale);
  fit.minimum = choose_greater(taken, zero, own.minimum, fit.minimum);
  for (int i = 0; i < kCount; ++i) codes[i] = choose_greater(taken, zero, own_codes[i], codes[i]);
  return fit;
}

// Sums the errors after shrinkage by the error's norm, which sets small errors to zero. Few weights have larger ones.
template <int kCount>
inline Floats kept_errors(const Floats x[kCount], Floats inverse, Floats zero, Floats scale, float levels,
                          float split) {
  alignas(64) float errors[kLanes], sums[kLanes] = {};
  for (int i = 0; i < kCount; ++i) {
    const Floats code = clamp(round_to_integral(add(mul(x[i], inverse), zero)), 0.0f, levels);
    store_floats(errors, sub(x[i], mul(sub(code, zero), scale)));
    for (int lane = 0; lane < kLanes; ++lane) {
      const float size = __builtin_fabsf(errors[lane]);
      const float kept = size > 0.0f ? size - std::pow(size, kNorm - 1.0f) / split : 0.0f;
      if (kept > 0.0f) sums[lane] += errors[lane] < 0.0f ? -kept : kept;
    }
  }
  return load_floats(sums);
}

// Fits a scale that spans the range, and the zero point with the smallest sum of absolute errors among the iterates of
// half-quadratic optimization.
template <int kCount>
inline Fit fit_half_quadratic(const Floats x[kCount], float levels, Floats codes[kCount]) {
  const Range<kCount> range(x);
  const Floats step = div(sub(range.highest, range.lowest), broadcast(levels));
  const Floats scale = rounded_to_half(maximum(step, broadcast(kSmallestStep)));
  const Floats inverse = div(broadcast(1.0f), scale);
  Floats zero = mul(sub(zero_floats(), range.lowest), inverse), best = zero, least = broadcast(INFINITY);
  float split = kSplit;
  for (int round = 0; round < kRounds; ++round) {
    Floats total = zero_floats(), largest = zero_floats(), offsets = zero_floats();
    for (int i = 0; i < kCount; ++i) {
      const Floats scaled = mul(x[i], inverse);
      const Floats code = clamp(round_to_integral(add(scaled, zero)), 0.0f, levels);
      const Floats size = magnitude_of(sub(x[i], mul(sub(code, zero), scale)));
      total = add(total, size);
      largest = maximum(largest, size);
      offsets = add(offsets, sub(code, scaled));
    }
    best = choose_greater(least, total, zero, best);
    least = minimum(least, total);
    // Shrinkage sets smaller errors to zero.
    const float limit = std::pow(1.0f / split, 1.0f / (2.0f - kNorm));
    if (max_of(largest) > limit)
      offsets = add(offsets, mul(kept_errors<kCount>(x, inverse, zero, scale, levels, split), inverse));
    zero = mul(offsets, broadcast(1.0f / kCount));
    split *= kGrowth;
  }
  const Fit fit{scale, rounded_to_half(sub(zero_floats(), mul(best, scale)))};
  affine_codes<kCount>(x, fit, levels, codes);
  return fit;
}

// Rounds to the nearest of sixteen ascending levels, by the midpoints between neighbours.
template <int kCount>
inline Fit fit_levels(const Floats x[kCount], const float* between, Floats codes[kCount]) {
  const Range<kCount> range(x);
  const Fit fit{rounded_to_half(maximum(magnitude_of(range.lowest), magnitude_of(range.highest))), zero_floats()};
  const Floats scale = one_where_zero(fit.scale);
  for (int i = 0; i < kCount; ++i) {
    const Floats ratio = div(x[i], scale);
    Floats code = zero_floats();
    for (int level = 0; level < kLevelSteps; ++level)
      code = choose_greater(ratio, broadcast(between[level]), add(code, broadcast(1.0f)), code);
    codes[i] = code;
  }
  return fit;
}

// Quantizes `count` groups of kCount columns of a row from `col` on, where `first` is the first group's number. Returns
// false as quantize_weights does.
template <int kCount>
inline bool quantize_some_groups(const paged_quantize_groups_args& args, int64_t row, int col, int first, int count) {
  const int end = col + count * kCount;
  const paged_quantize_args source{args.x, nullptr, nullptr, args.x_stride, 0, args.rows, end, args.dtype, 1, 0};
  const int64_t groups = (args.cols + kGroupWeights - 1) / kGroupWeights;
  const float levels = static_cast<float>((1 << args.bits) - 1);
  Floats x[kCount], codes[kCount];
  if (!(from_bits(load_groups<kCount>(source, row, col, x)) <= 32768.0f)) return false;
  const Fit fit = args.fit == PAGED_FIT_EDGE             ? fit_edge<kCount>(x, levels, codes)
                  : args.fit == PAGED_FIT_HALF_QUADRATIC ? fit_half_quadratic<kCount>(x, levels, codes)
                                                         : fit_levels<kCount>(x, args.between, codes);
  const LaneScales lanes(fit);
  std::memcpy(args.scales + row * groups + first, lanes.scale, count * sizeof(float));
  if (args.minima != nullptr) std::memcpy(args.minima + row * groups + first, lanes.minimum, count * sizeof(float));
  uint8_t* out = args.codes + row * args.cols + col;
  for (int at = 0; at < kCount; at += 16) {
    transpose(codes + at);
    for (int lane = 0; lane < count; ++lane) store_uint8(out + lane * kCount + at, to_nearest(codes[at + lane]));
  }
  if (args.numbers != nullptr)
    for (int i = 0; i < count * kCount; ++i) out[i] = args.numbers[out[i]];
  return true;
}

inline bool quantize_groups_of_row(const paged_quantize_groups_args& args, int64_t row) {
  const int whole = args.cols / kGroupWeights;
  for (int group = 0; group < whole; group += kLanes)
    if (!quantize_some_groups<kGroupWeights>(args, row, group * kGroupWeights, group, std::min(whole - group, kLanes)))
      return false;
  const int col = whole * kGroupWeights;
  return col == args.cols || quantize_some_groups<kGroupWeights / 2>(args, row, col, whole, 1);
}

}  // namespace
}  // namespace paged
