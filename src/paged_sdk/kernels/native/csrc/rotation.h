// Activations for a product in int8: normalised or gated, rotated by a block-diagonal Hadamard matrix, quantised with
// one scale per row.
#pragma once

#include <algorithm>

#include "activations.h"
#include "functions.h"

namespace paged {
namespace {

// Butterflies between vectors kStride apart, and those further.
template <int kVectors, int kStride>
inline void rotate_vectors(Floats v[kVectors]) {
  if constexpr (kStride < kVectors) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & kStride) == 0) {
        const Floats a = v[i], b = v[i + kStride];
        v[i] = add(a, b);
        v[i + kStride] = sub(a, b);
      }
    }
    rotate_vectors<kVectors, 2 * kStride>(v);
  }
}

// Each run of 16 kVectors numbers times Sylvester's matrix of ones and minus ones, in place, by the fast Walsh-Hadamard
// transform. Returns lane maxima of the magnitudes.
template <int kVectors>
inline Ints rotate_blocks(float* row, int cols) {
  Ints largest = zero_ints();
  for (int c = 0; c < cols; c += 16 * kVectors) {
    Floats v[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load_floats(row + c + 16 * i)))));
    rotate_vectors<kVectors, 1>(v);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      largest = max_magnitude(largest, v[i]);
      store_floats(row + c + 16 * i, v[i]);
    }
  }
  return largest;
}

inline Ints rotate_row(float* row, int cols, int block) {
  switch (block) {
    case 16:
      return rotate_blocks<1>(row, cols);
    case 32:
      return rotate_blocks<2>(row, cols);
    case 64:
      return rotate_blocks<4>(row, cols);
    case 128:
      return rotate_blocks<8>(row, cols);
    default:
      return rotate_blocks<16>(row, cols);
  }
}

// Quantises `row`, whose largest magnitude has the bits `largest`, to out; returns its scale for numbers that stand for
// `unit` times what they are. A NaN scale carries NaN and Inf to every output of the row, and to no other row.
inline float quantise_whole_row(const float* row, int cols, uint32_t largest, float unit, int8_t* out) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // below it 127 / maximum overflows; such values are zero
  float maximum;
  __builtin_memcpy(&maximum, &largest, 4);
  if (largest >= kInfinity || maximum < kSmallest) {
    std::fill_n(out, cols, int8_t{0});
    return largest >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const Floats factor = broadcast(127.0f / maximum);
  for (int c = 0; c < cols; c += 16) store_int8(out + c, to_nearest(mul(load_floats(row + c), factor)));
  return maximum / 127.0f * unit;
}

// x[row], times norm_weight where that is given, in float32. Returns 1 / rms then: the row's scale takes it, so that
// one pass does.
inline float load_row(const paged_rotate_args& args, const Matrix& x, int64_t row, float* out) {
  if (args.norm_weight == nullptr) {
    for (int c = 0; c < args.cols; c += 16) store_floats(out + c, x.load(row, c));
    return 1.0f;
  }
  for (int c = 0; c < args.cols; c += 16) store_floats(out + c, mul(x.load(row, c), load_floats(args.norm_weight + c)));
  return inverse_rms(x, row, args.cols, args.norm_eps);
}

// activation(gate) * up of x[row] = [gate | up], which the row's scale multiplies first.
inline void load_gated_row(const paged_rotate_args& args, const Matrix& x, int64_t row, float* out) {
  const Floats factor = broadcast(row_scale(args.row_scales, row));
  for (int c = 0; c < args.cols; c += 16) {
    const Floats gate = mul(x.load(row, c), factor), up = mul(x.load(row, args.cols + c), factor);
    store_floats(out + c, mul(activate(gate, args.activation), up));
  }
}

// The team's rows; `own` is the calling thread's memory for one of them.
inline void rotate_rows(const paged_rotate_args& args, float* own, const Team& team) {
  const Matrix x{args.x, args.x_stride, args.dtype};
  const int cols = args.cols;  // a copy: bytes that are written might be the arguments'
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(args.block));
  const auto [first, last] = team.share(args.num_rows);
  for (int64_t row = first; row < last; ++row) {
    float unit = norm;
    if (args.activation == PAGED_NOT_GATED) {
      unit *= load_row(args, x, row, own);
    } else {
      load_gated_row(args, x, row, own);
    }
    const Ints largest = rotate_row(own, cols, args.block);
    int8_t* out = args.out + row * cols;
    args.scales[row] = quantise_whole_row(own, cols, static_cast<uint32_t>(max_of(largest)), unit, out);
    if (args.is_unsigned)
      for (int c = 0; c < cols; ++c) out[c] = static_cast<int8_t>(out[c] ^ 0x80);
  }
}

}  // namespace
}  // namespace paged
