// Dot products of a group of 32 columns: 16 weight rows with a few activation rows.
//
// dot_group<kBits, kRows> calls take(r, lo, hi) for each activation row with the sums of the group's two halves.
// first(r, half) is the initial value of a sum; weights are below 2^kBits.
//
// kGainsInHadamard<Format>: whether many rows are faster in the Hadamard form (hadamard_product.h).
// kUnpackedOnce<Format>: from how many rows on it is faster to unpack weights once for all rows, rather than once per
// tile (panel.h).
#pragma once

#include <limits>

#include "activations.h"
#include "formats.h"

namespace paged {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

}  // namespace
}  // namespace paged

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "dots_avx2.h"
#else

namespace paged {
namespace {

template <class Format>
constexpr bool kGainsInHadamard = true;

// No gain at the portable level; not measured on NEON and AVX-512, whose tiles are four times as large.
template <class Format>
constexpr int kUnpackedOnce = kNever;

// Row by row: either the registers hold the group's weights, or a row's dot products need few enough loads anyway.
template <int kBits, int kRows, class First, class Take>
inline void dot_group(const Bytes (&w)[8], const ActivationGroup* a, const First& first, const Take& take) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    Ints lo = first(r, 0), hi = first(r, 1);
#if defined(__ARM_FEATURE_DOTPROD)
    dot_halves<kBits == 8>(w, a[r].q, lo, hi);
#else
    for (int q = 0; q < 4; ++q) {
      lo = dot4<kBits == 8>(lo, w[q], a[r].q + 4 * q);
      hi = dot4<kBits == 8>(hi, w[q + 4], a[r].q + 4 * q + 16);
    }
#endif
    take(r, lo, hi);
  }
}

}  // namespace
}  // namespace paged

#endif
