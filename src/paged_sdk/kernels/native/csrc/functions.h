// Functions of vectors: exponential, and the activations made of it.
#pragma once

#include "abi.h"
#include "simd.h"

namespace paged {
namespace {

// e^x to 2 ulp: 2^n times a polynomial on [-ln2 / 2, ln2 / 2] (Cephes' coefficients); 0 below -87, NaN stays NaN.
inline Floats exponential(Floats x) {
  constexpr float kLowest = -87.0f;
  const Floats clamped = minimum(broadcast(88.0f), maximum(broadcast(kLowest), x));
  const Floats n = round_to_integral(mul(clamped, broadcast(1.44269504088896341f)));
  Floats r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, broadcast(1.0f)));
  return zero_unless_above(x, kLowest, scale_by_power(p, n));
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

// cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + e^(2 u)).
inline Floats soft_cap(Floats x, float cap) {
  const Floats doubled = mul(x, broadcast(2.0f / cap));
  const Floats tail = div(broadcast(2.0f), add(broadcast(1.0f), exponential(doubled)));
  return mul(broadcast(cap), sub(broadcast(1.0f), tail));
}

}  // namespace
}  // namespace paged
