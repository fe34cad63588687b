// Linear layers over packed weights: several weights that share an input, and gated pairs, with bias and residual in
// the epilogue.
#pragma once

#include "functions.h"
#include "matrix_unit.h"
#include "panel.h"

namespace paged {
namespace {

// The destination of results: float32, bfloat16 or float16 rows of the caller, plus a residual that is added.
struct Output {
  void* data;
  int64_t stride;
  int32_t dtype;
  Matrix residual;  // data null: none; may alias `data`

  // Writes `count` (up to 16) columns of a row, plus bias and residual.
  void store(int64_t row, int64_t col, int count, Floats product, const float* bias) const {
    if (count == kPanelRows) {  // the common case, whole vectors
      Floats v = product;
      if (bias != nullptr) v = add(v, load_floats(bias));
      if (residual.data != nullptr) v = add(v, residual.load(row, col));
      store(row, col, v);
      return;
    }
    alignas(64) float sums[kPanelRows];
    store_floats(sums, product);
    for (int i = 0; i < count; ++i) {
      float v = sums[i] + (bias != nullptr ? bias[i] : 0.0f);
      if (residual.data != nullptr) v += residual.at(row, col + i);
      const int64_t at = row * stride + col + i;
      if (dtype == PAGED_FLOAT32) {
        static_cast<float*>(data)[at] = v;
      } else {
        static_cast<uint16_t*>(data)[at] = dtype == PAGED_BFLOAT16 ? to_bfloat16(v) : to_half(v);
      }
    }
  }
  // Prefetches the memory of 16 columns of a row for writing.
  void fetch(int64_t row, int64_t col) const {
    __builtin_prefetch(static_cast<uint8_t*>(data) + (row * stride + col) * (dtype == PAGED_FLOAT32 ? 4 : 2), 1, 2);
  }
  // Writes 16 columns of a row without bias or residual.
  void store(int64_t row, int64_t col, Floats v) const {
    const int64_t at = row * stride + col;
    if (dtype == PAGED_FLOAT32) {
      store_floats(static_cast<float*>(data) + at, v);
    } else if (dtype == PAGED_BFLOAT16) {
      store_bfloat16(static_cast<uint16_t*>(data) + at, v);
    } else {
      store_half(static_cast<uint16_t*>(data) + at, v);
    }
  }
};

// Maximum number of panels whose sums a thread holds.
constexpr int kSumPanels = kHasMatrixUnit ? 8 : 4;

// Bytes of a thread's sums of one panel, [num_rows][16].
constexpr size_t sums_bytes(int num_rows) { return sizeof(float) * kPanelRows * num_rows; }

// out[:, concat of the weights' rows] = x . W^T, for panels [first, last) of all weights.
inline void multiply_packed(const paged_weight* weights, const Activations& x, const Output& out,
                            float (*sums)[kPanelRows], int64_t first, int64_t last) {
  int64_t before = 0, col = 0;
  for (const paged_weight* next = weights; before < last; ++next) {
    const paged_weight& w = *next;
    const int64_t count = num_panels(w.rows);
    const PanelKernel kernel = panel_kernel(w);
    const int64_t begin = first > before ? first - before : 0, end = last - before < count ? last - before : count;
    for (int64_t p = begin; p < end; ++p) {
      kernel.multiply(w.data + p * kernel.panel_bytes, w, x, sums);
      const int64_t row0 = p * kPanelRows;
      const int width = w.rows - row0 < kPanelRows ? static_cast<int>(w.rows - row0) : kPanelRows;
      const float* bias = w.bias != nullptr ? w.bias + row0 : nullptr;
      for (int r = 0; r < x.num_rows; ++r) out.store(r, col + row0, width, load_floats(sums[r]), bias);
    }
    before += count;
    col += w.rows;
  }
}

// activation(gate) * up for the 16 columns from `col` on, after biases are added to the products.
inline Floats gate_columns(const paged_weight& gate, const paged_weight& up, int64_t col, Floats gate_product,
                           Floats up_product, int32_t activation) {
  if (gate.bias != nullptr) gate_product = add(gate_product, load_floats(gate.bias + col));
  if (up.bias != nullptr) up_product = add(up_product, load_floats(up.bias + col));
  return mul(activate(gate_product, activation), up_product);
}

// hidden[:, p * 16 ...] = activation(gate x) * (up x) for panels [first, last), alternating between gate and up.
inline void multiply_packed_gated(const paged_weight& gate, const paged_weight& up, const Activations& x,
                                  int32_t activation, float* hidden, float (*sums)[kPanelRows], int64_t first,
                                  int64_t last) {
  const PanelKernel gate_kernel = panel_kernel(gate), up_kernel = panel_kernel(up);
  float (*up_sums)[kPanelRows] = sums + x.num_rows;
  for (int64_t p = first; p < last; ++p) {
    gate_kernel.multiply(gate.data + p * gate_kernel.panel_bytes, gate, x, sums);
    up_kernel.multiply(up.data + p * up_kernel.panel_bytes, up, x, up_sums);
    for (int r = 0; r < x.num_rows; ++r)
      store_floats(hidden + static_cast<int64_t>(r) * gate.rows + p * kPanelRows,
                   gate_columns(gate, up, p * kPanelRows, load_floats(sums[r]), load_floats(up_sums[r]), activation));
  }
}

}  // namespace
}  // namespace paged
