// Quantizes rows to int8 for a product, after a block-diagonal Hadamard transform, with one scale per row.
#pragma once

#include <algorithm>

#include "activations.h"

namespace paged {
namespace {

// Butterflies between vectors kStride apart, and those further.
template <int kVectors, int kStride>
inline void hadamard_vectors(Floats v[kVectors]) {
  if constexpr (kStride < kVectors) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & kStride) == 0) {
        const Floats a = v[i], b = v[i + kStride];
        v[i] = add(a, b);
        v[i + kStride] = sub(a, b);
      }
    }
    hadamard_vectors<kVectors, 2 * kStride>(v);
  }
}

// Each run of 16 kVectors numbers times Sylvester's matrix of ones and minus ones, in place, by the fast Walsh-Hadamard
// transform. Returns lane maxima of the magnitudes.
template <int kVectors>
inline Ints hadamard_from_blocks(float* row, int cols) {
  Ints largest = zero_ints();
  for (int c = 0; c < cols; c += 16 * kVectors) {
    Floats v[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load_floats(row + c + 16 * i)))));
    hadamard_vectors<kVectors, 1>(v);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      largest = max_magnitude(largest, v[i]);
      store_floats(row + c + 16 * i, v[i]);
    }
  }
  return largest;
}

inline Ints hadamard_row(float* row, int cols, int block) {
  switch (block) {
    case 32:
      return hadamard_from_blocks<2>(row, cols);
    case 64:
      return hadamard_from_blocks<4>(row, cols);
    case 128:
      return hadamard_from_blocks<8>(row, cols);
    default:
      return hadamard_from_blocks<16>(row, cols);
  }
}

// Returns how many columns are transformed together: the largest power of two that divides all of them, a multiple of
// 32, up to 256. Larger blocks spread no better and cost more.
inline int hadamard_block(int cols) { return std::min(cols & -cols, 256); }

// Returns the scale of a row whose largest magnitude has the bits `largest`. A scale of NaN carries NaN and Inf to
// every output of the row, and to no other row.
inline float unit_of(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // below it 127 / maximum overflows; such values are zero
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = from_bits(largest);
  return maximum < kSmallest ? 0.0f : maximum / 127.0f;
}

// Quantizes `row` to runs of four codes, kStride bytes apart, whose bits are turned by kTurn. Returns the sum of the
// codes.
template <int kStride, uint32_t kTurn>
inline int32_t quantize_quads(const float* row, int cols, uint32_t largest, void* quads) {
  auto* to = static_cast<uint8_t*>(quads);
  if (!(unit_of(largest) > 0.0f)) {  // or NaN
    const uint32_t zeros = kTurn;
    for (int c = 0; c < cols; c += 4, to += kStride) __builtin_memcpy(to, &zeros, 4);
    return 0;
  }
  const Floats factor = broadcast(127.0f / from_bits(largest));
  Ints sum = zero_ints();
  for (int c = 0; c < cols; c += 16) {
    const Ints q = to_nearest(mul(load_floats(row + c), factor));
    sum = add(sum, q);
    alignas(16) uint32_t codes[4];
    store_int8(reinterpret_cast<int8_t*>(codes), q);
    for (int i = 0; i < 4; ++i, to += kStride) {
      const uint32_t quad = codes[i] ^ kTurn;
      __builtin_memcpy(to, &quad, 4);
    }
  }
  return sum_of(sum);
}

// Loads x[row], times norm_weight where that is given, in float32. With a norm it returns 1 / rms, by which the row's
// scale is multiplied, so that one pass is enough.
inline float load_row(const Matrix& x, int64_t row, int cols, const float* norm_weight, float eps, float* out) {
  if (norm_weight == nullptr) {
    for (int c = 0; c < cols; c += 16) store_floats(out + c, x.load(row, c));
    return 1.0f;
  }
  for (int c = 0; c < cols; c += 16) store_floats(out + c, mul(x.load(row, c), load_floats(norm_weight + c)));
  return inverse_rms(x, row, cols, eps);
}

}  // namespace
}  // namespace paged
