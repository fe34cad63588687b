// Quantizes vectors to f8e4m3 with one float32 scale, bit for bit as kernels/fp8.py defines it.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace paged {
namespace {

constexpr float kErrorSteps = 128.0f;  // rounding errors are counted in units of 1/128 of the scale

// Returns the squared error of rounding a vector to codes, in these units.
inline int32_t float8_error(const float* vector, int size, float inverse) {
  Ints sum = zero_ints();
  for (int c = 0; c < size; c += 16) {
    const Floats ratio = mul(load_floats(vector + c), broadcast(inverse));
    const Floats error = sub(ratio, round_to_4_bits(ratio));
    const Floats steps = round_to_integral(mul(error, broadcast(kErrorSteps)));
    sum = add(sum, to_nearest(mul(steps, steps)));
  }
  return sum_of(sum);
}

// Returns the scale with the least squared error among those that map the largest element to one of the codes from 256
// to 448.
inline float float8_scale(const float* vector, int size) {
  uint32_t bits = 0;
  for (int c = 0; c < size; c += 16) bits = std::max(bits, magnitude_bits(load_floats(vector + c)));
  const float peak = from_bits(bits);
  if (bits >= 0x7f800000) return peak;  // NaN or Inf
  float best = 0.0f, least = INFINITY;
  for (int code = 448; code >= 256; code -= 32) {
    const float scale = std::max(peak / code, 1.17549435e-38f);
    const float error = static_cast<float>(float8_error(vector, size, 1.0f / scale)) / (code * code);
    best = error < least ? scale : best;
    least = std::min(least, error);
  }
  return best;
}

// Rounds |x| < 464 to nearest even; NaN becomes f8e4m3's NaN.
inline uint8_t to_float8(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80, magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude < 0x3c800000)  // below 2^-6 the step is 2^-9, the last bit of a float32 near 2^14
    return static_cast<uint8_t>(sign | (bits_of(from_bits(magnitude) + 16384.0f) - 0x46800000));
  const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120 << 3)));
}

}  // namespace
}  // namespace paged
