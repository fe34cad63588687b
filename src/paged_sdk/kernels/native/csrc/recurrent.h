// What the kernels of recurrent layers have in common.
#pragma once

#include <cmath>

namespace paged {
namespace {

// log(1 + e^x); beyond 20 the difference from x is less than float32 holds.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
}  // namespace paged
