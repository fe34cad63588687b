// The gated feed-forward layer: activation(gate x) * (up x) fused between the products.
#pragma once

#include "functions.h"
#include "linear.h"

namespace paged {
namespace {

// hidden[:, p * 16 ...] = activation(gate x) * (up x): gate and up panels of the same rows one after the other.
inline void multiply_gated(const paged_weight& gate, const paged_weight& up, const Activations& x, int32_t activation,
                           float* hidden, float (*sums)[kPanelRows], const Team& team) {
  const PanelKernel gate_kernel = panel_kernel(gate.format), up_kernel = panel_kernel(up.format);
  float (*up_sums)[kPanelRows] = sums + x.num_rows;
  const auto [first, last] = team.share(num_panels(gate));
  for (int64_t p = first; p < last; ++p) {
    gate_kernel.multiply(gate.data + p * gate_kernel.panel_bytes(gate.cols), gate.cols, x, sums);
    up_kernel.multiply(up.data + p * up_kernel.panel_bytes(up.cols), up.cols, x, up_sums);
    for (int r = 0; r < x.num_rows; ++r)
      store_floats(hidden + static_cast<int64_t>(r) * gate.rows + p * kPanelRows,
                   mul(activate(load_floats(sums[r]), activation), load_floats(up_sums[r])));
  }
}

}  // namespace
}  // namespace paged
