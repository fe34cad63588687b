// What follows a product whose rows still want their scales.
#pragma once

#include <algorithm>

#include "linear.h"
#include "new_keys.h"

namespace paged {
namespace {

// `count` numbers of a product's row from `col` on, times the row's scale, plus bias, in float32.
inline void load_product(const Matrix& product, int64_t row, int64_t col, int count, float scale, const float* bias,
                         float* out) {
  const Floats factor = broadcast(scale);
  int c = 0;
  for (; c + 16 <= count; c += 16) {
    const Floats v = product.load(row, col + c);
    store_floats(out + c, bias != nullptr ? fma(v, factor, load_floats(bias + c)) : mul(v, factor));
  }
  for (; c < count; ++c) out[c] = product.at(row, col + c) * scale + (bias != nullptr ? bias[c] : 0.0f);
}

inline void finish_rows(const paged_finish_args& args, const Team& team) {
  const Matrix product{args.product, args.product_stride, args.product_dtype};
  const Output out{args.out, args.out_stride, args.dtype, {args.residual, args.residual_stride, args.dtype}};
  const auto [first, last] = team.share(args.num_rows);
  for (int64_t row = first; row < last; ++row) {
    for (int c = 0; c < args.cols; c += 16) {
      const int count = std::min(args.cols - c, 16);
      alignas(64) float v[16];
      const float* bias = args.bias != nullptr ? args.bias + c : nullptr;
      load_product(product, row, c, count, row_scale(args.row_scales, row), bias, v);
      out.store(row, c, count, v, nullptr);
    }
  }
}

// Queries, keys and values of one product; `own` is the calling thread's memory for one row.
inline void place_rows(const paged_place_args& args, float* own, const Team& team) {
  const paged_placement& placement = args.placement;
  const int queries = placement.heads.num_heads * placement.heads.head_size;
  const int width = queries + 2 * placement.heads.num_kv_heads * placement.heads.head_size;
  const Matrix product{args.product, args.product_stride, args.product_dtype};
  const Output out{args.out, queries, args.dtype, {}};
  const auto [first, last] = team.share(args.num_rows);
  for (int64_t row = first; row < last; ++row) {
    load_product(product, row, 0, width, row_scale(args.row_scales, row), args.bias, own);
    place_token(placement, own, row);
    for (int c = 0; c < queries; c += 16) out.store(row, c, load_floats(own + c));
  }
}

}  // namespace
}  // namespace paged
