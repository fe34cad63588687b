// Prepares activations for a product: loads, normalizes, and quantizes to int8 in groups of 16.
#pragma once

#include <limits>

#include "abi.h"
#include "layout.h"
#include "simd.h"
#include "workspace.h"

namespace paged {
namespace {

// 32 activations of one row in one cache line: x[i] = scale[i / 16] * q[i]. Two scales per group of weights cost one
// more product per group (about 5 % at 16 rows) and nearly halve the divergence from float32 activations: mean KL on
// SmolLM2-135M is 0.0038, against 0.0069 with scales per 32 and 0.0108 per 256.
struct alignas(64) ActivationGroup {
  int8_t q[kGroup];
  float scale[2];
  float scaled_sum;         // sum of the quantized x
  int32_t negative_sum[2];  // -sum(q) of each half
};
static_assert(sizeof(ActivationGroup) == 64);

// Rows are stored group by group ([K / 32][rows]): rows of one tile are adjacent in memory and never alias in a cache
// set, whatever K is.
struct Activations {
  ActivationGroup* groups;
  int num_rows;

  ActivationGroup* at(int64_t group, int64_t row) const { return groups + group * num_rows + row; }
  static size_t bytes(int64_t num_rows, int64_t cols) { return sizeof(ActivationGroup) * num_rows * (cols / kGroup); }
};

// A float32, bfloat16 or float16 matrix in the caller's memory.
struct Matrix {
  const void* data;
  int64_t stride;
  int32_t dtype;
  const int32_t* order = nullptr;  // column permutation for load_ordered; null: none

  Floats load(int64_t row, int64_t col) const {
    const int64_t i = row * stride + col;
    if (dtype == PAGED_FLOAT32) return load_floats(static_cast<const float*>(data) + i);
    const auto* halves = static_cast<const uint16_t*>(data) + i;
    return dtype == PAGED_BFLOAT16 ? load_bfloat16(halves) : load_half(reinterpret_cast<const uint8_t*>(halves));
  }
  // Loads 16 columns, from place `col` of the column permutation on.
  Floats load_ordered(int64_t row, int64_t col) const {
    if (order == nullptr) return load(row, col);
    alignas(64) float values[16];
    for (int i = 0; i < 16; ++i) values[i] = at(row, order[col + i]);
    return load_floats(values);
  }
  // Loads `count` elements, fewer than 16, padded with zeros.
  Floats load_first(int64_t row, int64_t col, int count) const {
    alignas(64) float values[16] = {};
    for (int i = 0; i < count; ++i) values[i] = at(row, col + i);
    return load_floats(values);
  }
  float at(int64_t row, int64_t col) const {
    const int64_t i = row * stride + col;
    if (dtype == PAGED_FLOAT32) return static_cast<const float*>(data)[i];
    const uint16_t half = static_cast<const uint16_t*>(data)[i];
    return dtype == PAGED_BFLOAT16 ? from_bits(static_cast<uint32_t>(half) << 16) : half_to_float(half);
  }
};

// Loads 16 per-column numbers, from place `col` of the column permutation on.
inline Floats load_ordered(const float* numbers, const int32_t* order, int64_t col) {
  return Matrix{numbers, 0, PAGED_FLOAT32, order}.load_ordered(0, col);
}

// Quantizes 16 values; returns their sum.
inline float quantize_half(Floats x, ActivationGroup& out, int half) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // below it 127 / maximum overflows; such values are zero
  const uint32_t bits = magnitude_bits(x);
  float maximum;
  __builtin_memcpy(&maximum, &bits, 4);
  if (bits >= kInfinity || maximum < kSmallest) {
    // A NaN scale propagates NaN and Inf to every output of this row only.
    out.scale[half] = bits >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    out.negative_sum[half] = 0;
    __builtin_memset(out.q + 16 * half, 0, 16);
    return out.scale[half];
  }
  const Ints q = to_nearest(mul(x, broadcast(127.0f / maximum)));
  store_int8(out.q + 16 * half, q);
  const int32_t sum = sum_of(q);
  out.scale[half] = maximum / 127.0f;
  out.negative_sum[half] = -sum;
  return out.scale[half] * static_cast<float>(sum);
}

// Returns 1 / rms of a row. Four accumulators in a fixed order make the result independent of the batch; constant
// indices keep them in registers.
inline float inverse_rms(const Matrix& x, int64_t row, int cols, float eps) {
  Floats sums[4] = {zero_floats(), zero_floats(), zero_floats(), zero_floats()};
  int c = 0;
  for (; c + 64 <= cols; c += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Floats v = x.load(row, c + 16 * i);
      sums[i] = fma(v, v, sums[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int left = cols - c - 16 * i;
    if (left <= 0) break;
    const Floats v = left >= 16 ? x.load(row, c + 16 * i) : x.load_first(row, c + 16 * i, left);
    sums[i] = fma(v, v, sums[i]);
  }
  const float total = sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(cols) + eps);
}

// Applies RMSNorm to a row in place: x / rms(x) * weight; without a weight, x / rms(x).
inline void normalize(float* row, int size, const float* weight, float eps) {
  const Floats factor = broadcast(inverse_rms({row, size, PAGED_FLOAT32}, 0, size, eps));
  for (int c = 0; c < size; c += 16) {
    const Floats scaled = mul(load_floats(row + c), factor);
    store_floats(row + c, weight == nullptr ? scaled : mul(scaled, load_floats(weight + c)));
  }
}

// Applies LayerNorm to a row: (x - mean(x)) / deviation(x) * weight + bias. The bias may be null; out may be row.
inline void normalize_layer(const float* row, int size, const float* weight, const float* bias, float eps, float* out) {
  Floats sum = zero_floats();
  for (int c = 0; c < size; c += 16) sum = add(sum, load_floats(row + c));
  const Floats mean = broadcast(sum_of(sum) / static_cast<float>(size));
  Floats squares = zero_floats();
  for (int c = 0; c < size; c += 16) {
    const Floats centered = sub(load_floats(row + c), mean);
    squares = fma(centered, centered, squares);
  }
  const float variance = sum_of(squares) / static_cast<float>(size);
  const Floats factor = broadcast(1.0f / __builtin_sqrtf(variance + eps));
  for (int c = 0; c < size; c += 16) {
    const Floats normed = mul(mul(sub(load_floats(row + c), mean), factor), load_floats(weight + c));
    store_floats(out + c, bias != nullptr ? add(normed, load_floats(bias + c)) : normed);
  }
}

// Writes the norm of a row to `out`, or the row itself if `weight` is null. `norm` is a PagedNorm.
inline void normalize_into(int32_t norm, const float* row, int size, const float* weight, const float* bias, float eps,
                           float* out) {
  if (weight != nullptr && norm == PAGED_LAYER_NORM) return normalize_layer(row, size, weight, bias, eps, out);
  __builtin_memcpy(out, row, sizeof(float) * size);
  if (weight != nullptr) normalize(out, size, weight, eps);
}

// Quantizes row `row` of x, times 1 / rms and norm_weight if given, to row `place` of out.
inline void quantize_row(const Matrix& x, int64_t row, int cols, const float* norm_weight, float eps,
                         const Activations& out, int64_t place) {
  const Floats factor = broadcast(norm_weight != nullptr ? inverse_rms(x, row, cols, eps) : 1.0f);
  for (int g = 0; g < cols / kGroup; ++g) {
    const int c = g * kGroup;
    Floats a = x.load_ordered(row, c), b = x.load_ordered(row, c + 16);
    if (norm_weight != nullptr) {
      a = mul(mul(a, factor), load_ordered(norm_weight, x.order, c));
      b = mul(mul(b, factor), load_ordered(norm_weight, x.order, c + 16));
    }
    ActivationGroup& group = *out.at(g, place);
    const float sum = quantize_half(a, group, 0);
    group.scaled_sum = sum + quantize_half(b, group, 1);
  }
}

// Cost of preparing a row of `cols` columns, in byte multiply-adds (pool.h): about 0.2 ns per column.
inline int64_t row_cost(int cols) { return int64_t{100} * cols; }

}  // namespace
}  // namespace paged
