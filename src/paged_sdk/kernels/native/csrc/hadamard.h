// Quantizes rows to int8 after a block-diagonal Hadamard transform, with one scale per block of columns.
#pragma once

#include <algorithm>

#include "activations.h"
#include "layout.h"

namespace paged {
namespace {

// Multiplies 32 numbers by Sylvester's Hadamard matrix, by the fast Walsh-Hadamard transform.
inline void hadamard_group(Floats& low, Floats& high) {
  const Floats a = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(low))));
  const Floats b = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(high))));
  low = add(a, b);
  high = sub(a, b);
}

// Returns the scale of codes whose largest magnitude has the bits `largest`. A NaN scale propagates NaN and Inf to
// every output of this row only.
inline float unit_of(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // below it 127 / maximum overflows; such values are zero
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = from_bits(largest);
  return maximum < kSmallest ? 0.0f : maximum / 127.0f;
}

// Transforms up to kScaleGroups groups of a row from column `col` on, times norm_weight if given. Returns the scale of
// the codes; `factor` is 127 / the largest magnitude, which turns the numbers into codes.
inline float transform_row(const Matrix& x, int64_t row, int col, int groups, const float* norm_weight, float* out,
                           float& factor) {
  Ints largest = zero_ints();
  for (int i = 0; i < groups * kGroup; i += kGroup) {
    Floats low = x.load_ordered(row, col + i), high = x.load_ordered(row, col + i + 16);
    if (norm_weight != nullptr) {
      low = mul(low, load_ordered(norm_weight, x.order, col + i));
      high = mul(high, load_ordered(norm_weight, x.order, col + i + 16));
    }
    hadamard_group(low, high);
    largest = max_magnitude(max_magnitude(largest, low), high);
    store_floats(out + i, low);
    store_floats(out + i + 16, high);
  }
  const auto bits = static_cast<uint32_t>(max_of(largest));
  const float unit = unit_of(bits);
  if (unit > 0.0f) {
    factor = 127.0f / from_bits(bits);
  } else {  // or NaN: codes are zero
    factor = 0.0f;
    __builtin_memset(out, 0, sizeof(float) * groups * kGroup);
  }
  return unit;
}

}  // namespace
}  // namespace paged
