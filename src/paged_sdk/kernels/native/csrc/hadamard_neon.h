// The inner loop of products in the Hadamard form (hadamard_product.h) on NEON: one panel at a time, since four rows'
// accumulators of one panel take half of the registers.
#pragma once

#include "layout.h"
#include "simd.h"

namespace paged {
namespace {

// sum[r] += the panel . row r of a tile, given as codes, for two rows or the whole tile.
#if defined(__ARM_FEATURE_MATMUL_INT8)
// Each instruction multiplies two rows' eight columns with those of two other rows; zipping two quads makes a row's
// columns adjacent. It does twice the work of a dot product, and a quarter of the instructions zip.
template <int kRows>
inline void dot_panel(const uint8_t* weights, const int8_t* codes, int64_t quads, Ints (&sum)[kRows]) {
  int32x4_t squares[4][2][kRows / 2];  // [quarter][pair of weight rows][pair of rows]: 2 x 2 sums each
  for (auto& quarter : squares)
    for (auto& pair : quarter)
      for (int32x4_t& square : pair) square = vdupq_n_s32(0);
  const auto zip_low = [](auto a, auto b) { return vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)); };
  const auto zip_high = [](auto a, auto b) { return vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)); };
  for (int64_t quad = 0; quad < quads; quad += 2, weights += 2 * kVector, codes += 8 * kTokenTile) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
    const uint8x16_t even = vld1q_u8(bytes), odd = vld1q_u8(bytes + 4 * kTokenTile);
    int8x16_t x[kRows / 2];
    x[0] = vreinterpretq_s8_u32(zip_low(even, odd));
    if constexpr (kRows > 2) x[1] = vreinterpretq_s8_u32(zip_high(even, odd));
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t a = vld1q_u8(weights + 16 * i), b = vld1q_u8(weights + kVector + 16 * i);
      const uint8x16_t w[2] = {vreinterpretq_u8_u32(zip_low(a, b)), vreinterpretq_u8_u32(zip_high(a, b))};
      for (int j = 0; j < 2; ++j)
        for (int r = 0; r < kRows / 2; ++r) squares[i][j][r] = vusmmlaq_s32(squares[i][j][r], w[j], x[r]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int r = 0; r < kRows / 2; ++r) {
      const int32x4_t low = squares[i][0][r], high = squares[i][1][r];
      sum[2 * r].v[i] = vaddq_s32(sum[2 * r].v[i], vuzp1q_s32(low, high));
      sum[2 * r + 1].v[i] = vaddq_s32(sum[2 * r + 1].v[i], vuzp2q_s32(low, high));
    }
  }
}
#else
template <int kRows>
inline void dot_panel(const uint8_t* weights, const int8_t* codes, int64_t quads, Ints (&sum)[kRows]) {
  Ints own[kRows];  // kept in registers, unlike the caller's array of several panels
  for (int r = 0; r < kRows; ++r) own[r] = sum[r];
  for (int64_t quad = 0; quad < quads; ++quad, weights += kVector, codes += 4 * kTokenTile) {
    const Bytes w = load_bytes(weights);
    const int8x16_t x = vld1q_s8(codes);
    own[0] = dot_four<true, 0>(own[0], w, x);
    own[1] = dot_four<true, 1>(own[1], w, x);
    if constexpr (kRows > 2) {
      own[2] = dot_four<true, 2>(own[2], w, x);
      own[3] = dot_four<true, 3>(own[3], w, x);
    }
  }
  for (int r = 0; r < kRows; ++r) sum[r] = own[r];
}
#endif

}  // namespace
}  // namespace paged
