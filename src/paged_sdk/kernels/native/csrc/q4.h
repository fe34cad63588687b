// Reads and writes 4-bit codes of keys and values: two per byte, with a scale and a minimum per 32 neighbouring
// elements. Writes them bit for bit as kernels/q4.py defines it.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace paged {
namespace {

constexpr int kQ4Group = 32;  // elements of a group; byte i has elements i and i + 16

// A group's scale and minimum: two bfloat16 numbers.
inline uint32_t q4_parameters(const void* scales, int64_t group) {
  uint32_t both;
  __builtin_memcpy(&both, static_cast<const uint8_t*>(scales) + group * sizeof(both), sizeof(both));
  return both;
}
inline float q4_scale(uint32_t parameters) { return from_bits(parameters << 16); }
inline float q4_minimum(uint32_t parameters) { return from_bits(parameters & 0xffff0000); }

// Loads the lower or upper 16 elements of a group.
inline Floats load_q4(const void* data, const void* scales, int64_t group, bool upper) {
  const uint8_t* codes = static_cast<const uint8_t*>(data) + group * (kQ4Group / 2);
  const uint32_t parameters = q4_parameters(scales, group);
  return fma(upper ? load_nibbles<true>(codes) : load_nibbles<false>(codes), broadcast(q4_scale(parameters)),
             broadcast(q4_minimum(parameters)));
}

// Candidate ranges of the codes: shares of a group's range that are cut off at its lower and at its upper end.
constexpr float kQ4Cuts[] = {0.0f, 0.04f, 0.08f};
constexpr float kQ4MaxCode = 15.0f;
constexpr float kQ4ErrorSteps = 128.0f;  // rounding errors are counted in units of 1/128 of the scale
constexpr float kQ4MostSteps = 2047.0f;  // larger ones count as this

inline float round_to_bfloat16_float(float a) { return from_bits(static_cast<uint32_t>(to_bfloat16(a)) << 16); }

// The range of a group's codes.
struct Q4Range {
  float scale, minimum;

  Floats ratio(Floats x) const { return mul(sub(x, broadcast(minimum)), broadcast(1.0f / scale)); }
  static Floats code(Floats ratio) {
    return round_to_integral(paged::minimum(broadcast(kQ4MaxCode), maximum(zero_floats(), ratio)));
  }
  // Returns the squared error of 16 elements, lane by lane.
  Ints errors(Floats x) const {
    const Floats exact = ratio(x), error = mul(sub(exact, code(exact)), broadcast(kQ4ErrorSteps));
    const Floats limit = broadcast(kQ4MostSteps);
    const Floats steps = round_to_integral(paged::minimum(limit, maximum(sub(zero_floats(), limit), error)));
    return to_nearest(mul(steps, steps));
  }
};

// Quantizes one group. If an element is NaN or Inf, or the range is no float32 number, all elements become NaN.
inline void store_q4_group(const float* x, uint8_t* codes, uint16_t* parameters) {
  const Floats low = load_floats(x), high = load_floats(x + 16), zero = zero_floats();
  const float highest = max_of(maximum(low, high)), lowest = -max_of(maximum(sub(zero, low), sub(zero, high)));
  const float width = highest - lowest;
  if (std::max(magnitude_bits(low), magnitude_bits(high)) >= 0x7f800000 || !(width < INFINITY)) {
    constexpr uint16_t kNotANumber = 0x7fc0;
    parameters[0] = parameters[1] = kNotANumber;
    __builtin_memset(codes, 0, kQ4Group / 2);
    return;
  }
  Q4Range best{};  // none yet
  float least = INFINITY;
  for (const float below : kQ4Cuts) {
    const float minimum = round_to_bfloat16_float(lowest + width * below);
    for (const float above : kQ4Cuts) {
      const float share = (1.0f - below - above) / kQ4MaxCode;
      const Q4Range range{round_to_bfloat16_float(std::max(width * share, 1.17549435e-38f)), minimum};
      const int32_t squares = sum_of(add(range.errors(low), range.errors(high)));
      const float error = static_cast<float>(squares) * (range.scale * range.scale);
      if (best.scale == 0.0f || error < least) best = range, least = error;
    }
  }
  parameters[0] = to_bfloat16(best.scale);
  parameters[1] = to_bfloat16(best.minimum);
  const Floats lower = Q4Range::code(best.ratio(low)), upper = Q4Range::code(best.ratio(high));
  store_uint8(codes, to_nearest(fma(upper, broadcast(16.0f), lower)));
}

// Quantizes vector `index` of a cache.
inline void store_q4(const float* vector, int size, void* data, void* scales, int64_t index) {
  const int groups = size / kQ4Group;
  auto* codes = static_cast<uint8_t*>(data) + index * groups * (kQ4Group / 2);
  auto* parameters = static_cast<uint16_t*>(scales) + index * groups * 2;
  for (int g = 0; g < groups; ++g)
    store_q4_group(vector + g * kQ4Group, codes + g * (kQ4Group / 2), parameters + 2 * g);
}

}  // namespace
}  // namespace paged
