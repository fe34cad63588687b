// Multiplies small dense matrices: attention's scores and weighted values.
#pragma once

#include "simd.h"

namespace paged {
namespace {

// Element type of a product: how elements are loaded and multiplied.
struct FloatDot {
  using Scalar = float;
  using Vector = Floats;
  static Vector load(const float* p) { return load_floats(p); }
  static Vector same(float a) { return broadcast(a); }
  static Floats multiply_add(Vector a, Vector b, Floats sum) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// An element is a pair of bfloat16 numbers, consecutive along the depth.
struct PairDot {
  using Scalar = uint32_t;
  using Vector = Pairs;
  static Vector load(const uint32_t* p) { return load_pairs(p); }
  static Vector same(uint32_t a) { return broadcast_pair(a); }
  static Floats multiply_add(Vector a, Vector b, Floats sum) { return dot_pairs(a, b, sum); }
};
#endif

// Register tile: out[r][0 .. 16 kWide) (+)= sum_k a[r][k] b[k][...], for kRows rows.
template <class Dot, int kRows, int kWide>
inline void multiply_dense_tile(const typename Dot::Scalar* a, int a_stride, const typename Dot::Scalar* b,
                                int b_stride, int depth, float* out, int out_stride, bool accumulate) {
  Floats sums[kRows][kWide];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v)
      sums[r][v] = accumulate ? load_floats(out + r * out_stride + 16 * v) : zero_floats();
  for (int k = 0; k < depth; ++k) {
    typename Dot::Vector right[kWide];
    for (int v = 0; v < kWide; ++v) right[v] = Dot::load(b + k * b_stride + 16 * v);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename Dot::Vector left = Dot::same(a[r * a_stride + k]);
      for (int v = 0; v < kWide; ++v) sums[r][v] = Dot::multiply_add(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) store_floats(out + r * out_stride + 16 * v, sums[r][v]);
}

template <class Dot, int kRows>
inline void multiply_dense_rows(int& row, int num_rows, const typename Dot::Scalar* a, int a_stride,
                                const typename Dot::Scalar* b, int b_stride, int depth, float* out, int out_stride,
                                int width, bool accumulate) {
  if constexpr (kRows <= kDenseTile) {
    for (; num_rows - row >= kRows; row += kRows) {
      const typename Dot::Scalar* left = a + row * a_stride;
      float* target = out + row * out_stride;
      int c = 0;
      for (; c + 16 * kDenseWide <= width; c += 16 * kDenseWide)
        multiply_dense_tile<Dot, kRows, kDenseWide>(left, a_stride, b + c, b_stride, depth, target + c, out_stride,
                                                    accumulate);
      for (; c < width; c += 16)
        multiply_dense_tile<Dot, kRows, 1>(left, a_stride, b + c, b_stride, depth, target + c, out_stride, accumulate);
    }
  }
}

// out [num_rows, width] (+)= a [num_rows, depth] . b [depth, width]; width is a multiple of 16. The order of a row's
// sums does not depend on the other rows.
template <class Dot>
inline void multiply_dense(int num_rows, const typename Dot::Scalar* a, int a_stride, const typename Dot::Scalar* b,
                           int b_stride, int depth, float* out, int out_stride, int width, bool accumulate) {
  int row = 0;
  multiply_dense_rows<Dot, 12>(row, num_rows, a, a_stride, b, b_stride, depth, out, out_stride, width, accumulate);
  multiply_dense_rows<Dot, 6>(row, num_rows, a, a_stride, b, b_stride, depth, out, out_stride, width, accumulate);
  multiply_dense_rows<Dot, 3>(row, num_rows, a, a_stride, b, b_stride, depth, out, out_stride, width, accumulate);
  multiply_dense_rows<Dot, 1>(row, num_rows, a, a_stride, b, b_stride, depth, out, out_stride, width, accumulate);
}

}  // namespace
}  // namespace paged
