// Quantizes rows to int8 for a product, after a block-diagonal Hadamard transform, with one scale per block of columns.
#pragma once

#include <algorithm>

#include "activations.h"
#include "layout.h"

namespace paged {
namespace {

// 32 numbers times Sylvester's matrix of ones and minus ones, by the fast Walsh-Hadamard transform.
inline void hadamard_group(Floats& low, Floats& high) {
  const Floats a = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(low))));
  const Floats b = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(high))));
  low = add(a, b);
  high = sub(a, b);
}

// Returns the scale of codes whose largest magnitude has the bits `largest`. A scale of NaN carries NaN and Inf to
// every output of the row, and to no other row.
inline float unit_of(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // below it 127 / maximum overflows; such values are zero
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = from_bits(largest);
  return maximum < kSmallest ? 0.0f : maximum / 127.0f;
}

// The codes of up to kScaleGroups groups, in runs of four that are kStride bytes apart; returns their scale, and in
// `sum` their sum. v has two vectors per group.
template <int kStride>
inline float quantize_quads(const Floats* v, int groups, int8_t* quads, int32_t& sum) {
  Ints largest = zero_ints();
  for (int i = 0; i < 2 * groups; ++i) largest = max_magnitude(largest, v[i]);
  const auto bits = static_cast<uint32_t>(max_of(largest));
  const float unit = unit_of(bits);
  if (!(unit > 0.0f)) {  // or NaN
    for (int q = 0; q < 8 * groups; ++q) __builtin_memset(quads + q * kStride, 0, 4);
    sum = 0;
    return unit;
  }
  const Floats factor = broadcast(127.0f / from_bits(bits));
  Ints sums = zero_ints();
  for (int i = 0; i < 2 * groups; ++i) {
    const Ints codes = to_nearest(mul(v[i], factor));
    sums = add(sums, codes);
    alignas(16) int8_t bytes[16];
    store_int8(bytes, codes);
    for (int q = 0; q < 4; ++q, quads += kStride) __builtin_memcpy(quads, bytes + 4 * q, 4);
  }
  sum = sum_of(sums);
  return unit;
}

}  // namespace
}  // namespace paged
