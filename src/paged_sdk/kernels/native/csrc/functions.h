// Vector functions: the exponential, and activations based on it.
#pragma once

#include <cmath>
#include <initializer_list>

#include "abi.h"
#include "simd.h"

namespace paged {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x to 2 ulp: 2^n times the Taylor polynomial of 2^f on [-1/2, 1/2], with an error below 2e-7. Below -126 the result
// is 0; NaN stays NaN.
inline Floats exponential2(Floats x) {
  constexpr float kLowest = -126.0f;
  const Floats clamped = minimum(broadcast(127.0f), maximum(broadcast(kLowest), x));
  const Floats n = round_to_integral(clamped);
  const Floats f = sub(clamped, n);
  Floats p = broadcast(1.54035304e-4f);
  p = fma(p, f, broadcast(1.33335581e-3f));
  p = fma(p, f, broadcast(9.61812911e-3f));
  p = fma(p, f, broadcast(5.55041087e-2f));
  p = fma(p, f, broadcast(2.40226507e-1f));
  p = fma(p, f, broadcast(6.93147181e-1f));
  p = fma(p, f, broadcast(1.0f));
  return zero_unless_above(x, kLowest, scale_by_power(p, n));
}

// 2^x for x <= 0 to 8e-5, a fiftieth of a bfloat16's last bit: 2^floor(x) times the minimax polynomial of 2^f on [0, 1]
// in relative error. Takes half the instructions of exponential2, which are a fifth of an attention tile's.
inline Floats rough_exponential2(Floats x) {
  const Floats f = fraction(x);
  Floats p = broadcast(7.80240297e-2f);
  p = fma(p, f, broadcast(2.26067066e-1f));
  p = fma(p, f, broadcast(6.95833981e-1f));
  p = fma(p, f, broadcast(9.99925137e-1f));
  return scale_by_floor(p, x);
}

// e^x. x * log2 e is rounded, so the relative error grows as |x| 6e-8.
inline Floats exponential(Floats x) { return exponential2(mul(x, broadcast(kLog2E))); }

inline Floats sigmoid(Floats x) {
  return div(broadcast(1.0f), add(broadcast(1.0f), exponential(sub(zero_floats(), x))));
}

// SiLU is x * sigmoid(x); tanh-GELU is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats activate(Floats x, int32_t activation) {
  if (activation == PAGED_RELU2) {
    const Floats positive = maximum(zero_floats(), x);
    return mul(positive, positive);
  }
  Floats u = x;
  if (activation == PAGED_GELU_TANH) {
    const Floats inner = fma(mul(mul(x, x), x), broadcast(0.044715f), x);
    u = mul(inner, broadcast(1.5957691216057308f));
  }
  return div(x, add(broadcast(1.0f), exponential(sub(zero_floats(), u))));
}

// e^x - 1 - x for x <= 0: above -1/2, where the subtractions would cancel, by its Taylor series, to 1e-7 of the result.
inline Floats exponential_beyond_line(Floats x) {
  constexpr float kSeries = -0.5f;
  Floats p = broadcast(1.0f / 40320);
  for (const float factorial : {5040.0f, 720.0f, 120.0f, 24.0f, 6.0f, 2.0f}) p = fma(p, x, broadcast(1 / factorial));
  const Floats direct = sub(sub(exponential(x), broadcast(1.0f)), x);
  const Floats series = zero_unless_above(x, kSeries, mul(mul(x, x), p));
  return add(series, sub(direct, zero_unless_above(x, kSeries, direct)));
}

// xIELU (Huang and Schlag, 2024, arXiv 2411.13010); `numbers` are at the places of PagedXielu.
inline Floats xielu(Floats x, const float* numbers) {
  const Floats lower = minimum(zero_floats(), x), y = minimum(broadcast(numbers[PAGED_EPS]), lower);
  const Floats below = mul(add(exponential_beyond_line(y), sub(y, lower)), broadcast(numbers[PAGED_NEGATIVE]));
  const Floats above = mul(mul(x, x), broadcast(numbers[PAGED_POSITIVE]));
  const Floats curve = sub(add(below, zero_unless_above(x, 0.0f, above)), zero_unless_above(x, 0.0f, below));
  return fma(broadcast(numbers[PAGED_BETA]), x, curve);
}

// The hidden activations of an expert: activation(gate) * up, or with a limit, gpt-oss's clamped variant.
inline Floats gated_expert(Floats gate, Floats up, int32_t activation, float alpha, float limit) {
  if (limit == 0.0f) return mul(activate(gate, activation), up);
  const Floats highest = broadcast(limit);
  gate = minimum(highest, gate);
  up = minimum(highest, maximum(broadcast(-limit), up));
  const Floats power = exponential(mul(gate, broadcast(-alpha)));
  return mul(add(up, broadcast(1.0f)), div(gate, add(broadcast(1.0f), power)));
}

// cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + e^(2 u)).
inline Floats soft_cap(Floats x, float cap) {
  const Floats doubled = mul(x, broadcast(2.0f / cap));
  const Floats tail = div(broadcast(2.0f), add(broadcast(1.0f), exponential(doubled)));
  return mul(broadcast(cap), sub(broadcast(1.0f), tail));
}

// log(1 + e^x); beyond 20 the difference from x is less than float32 holds.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
}  // namespace paged
