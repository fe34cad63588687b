// The gated feed-forward layer: activation(gate x) * (up x) fused between the products.
#pragma once

#include "linear.h"

namespace paged {
namespace {

// e^x to 2 ulp: 2^n times a polynomial on [-ln2 / 2, ln2 / 2] (Cephes' coefficients); NaN stays NaN.
inline Floats exponential(Floats x) {
  x = minimum(broadcast(88.0f), maximum(broadcast(-87.0f), x));
  const Floats n = round_to_integral(mul(x, broadcast(1.44269504088896341f)));
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, broadcast(1.0f)));
  return scale_by_power(p, n);
}

// SiLU is x * sigmoid(x); GELU with tanh is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats activate(Floats x, int32_t activation) {
  Floats u = x;
  if (activation == PAGED_GELU_TANH) {
    const Floats inner = fma(mul(mul(x, x), x), broadcast(0.044715f), x);
    u = mul(inner, broadcast(1.5957691216057308f));
  }
  return div(x, add(broadcast(1.0f), exponential(sub(zero_floats(), u))));
}

// hidden[:, p * 16 ...] = activation(gate x) * (up x): gate and up panels of the same rows one after the other.
inline void multiply_gated(const paged_weight& gate, const paged_weight& up, const Activations& x, int32_t activation,
                           float* hidden, float (*sums)[kPanelRows], const Team& team) {
  const PanelKernel gate_kernel = panel_kernel(gate.format), up_kernel = panel_kernel(up.format);
  float(*up_sums)[kPanelRows] = sums + x.num_rows;
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
