// Dot products on AVX2, whose 16 registers cannot hold a group's weights: each quad (layout.h) is multiplied with every
// row before the next quad.
#pragma once

#include "activations.h"
#include "formats.h"

namespace paged {
namespace {

// Broadcasts a row's four codes of a quad to all 32-bit lanes.
inline __m256i broadcast_quad(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

#ifdef __AVXVNNI__

template <class Format>
constexpr bool kGainsInHadamard = true;

template <class Format>
constexpr int kUnpackedOnce = kNever;  // not measured

// sum[r] += w . x[r], over half a group (four quads).
template <int kBits, int kRows>
[[gnu::always_inline]] inline void dot_half(const Bytes* w, const ActivationGroup* a, int half, Ints (&sum)[kRows]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = dot4<kBits == 8>(sum[r], w[q], a[r].q + 16 * half + 4 * q);
  }
}

#else

// No gain for weights of six bits or fewer: the transform widens them to eight bits, whose products cannot be summed in
// 16 bits. TOP/s with 64 and 512 rows of 1536 x 8960, packed and in the Hadamard form: Q8_0 0.13, 0.12 and 0.16, 0.17;
// Q6_K 0.20, 0.20 and 0.15, 0.18; Q3_K 0.21, 0.22 and 0.16, 0.19; Q2_K 0.19, 0.18 and 0.14, 0.17 (two threads of AMD
// Zen 3, medians).
template <class Format>
constexpr bool kGainsInHadamard = Format::kLayout.bits() == 8;

// Speedup over unpacking once per tile, with 12, 24 and 64 rows of 1536 x 2240: Q3_K 1.2, 1.3 and 1.35; Q5_K 1.2, 1.3
// and 1.4; Q6_K 1.2 with 12 rows, 1.35 with 64; Q5_0 1.1, 1.2 and 1.25; Q2_K 1.0, 1.1 and 1.15; Q4_K 1.0, 1.05 and 1.1;
// Q4_1 and Q4_0 0.92, 0.98 and 1.03; Q8_0, which needs no unpacking, 0.9 (one thread of AMD Zen 3, alternating calls,
// medians).
template <class Format>
constexpr int kUnpackedOnce = [] {
  constexpr const Layout& kLayout = Format::kLayout;
  if (kLayout.bits() == 8) return kNever;
  return kLayout.planes == Planes::kNibbles && kLayout.groups != 8 ? 32 : 9;
}();

// Bytes widened to 16 bits: columns 0 and 2 of a quad, and columns 1 and 3.
struct WidePairs {
  Bytes even, odd;
};
inline WidePairs widen_unsigned(Bytes a) {
  const __m256i low = _mm256_set1_epi16(0xff);
  return {{_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low)},
          {_mm256_srli_epi16(a.lo, 8), _mm256_srli_epi16(a.hi, 8)}};
}

// Adds a quad's products with 8-bit weights, for which a sum of two byte products exceeds 16 bits. even and odd hold
// two 16-bit activations each.
inline void add_wide(Ints& sum, const WidePairs& w, int32_t even, int32_t odd) {
  const __m256i x_even = _mm256_set1_epi32(even), x_odd = _mm256_set1_epi32(odd);
  sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.even.lo, x_even));
  sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.even.hi, x_even));
  keep_in_register(sum);
  sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.odd.lo, x_odd));
  sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.odd.hi, x_odd));
  keep_in_register(sum);
}

template <int kRows>
[[gnu::always_inline]] inline void dot_half_wide(const Bytes* w, const ActivationGroup* a, int half,
                                                 Ints (&sum)[kRows]) {
  alignas(16) int32_t pairs[kRows][2][4];  // [row][columns 0, 2 or 1, 3][quad]
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const __m128i x = load128(a[r].q + 16 * half);
    store128(pairs[r][0], _mm_srai_epi16(_mm_slli_epi16(x, 8), 8));
    store128(pairs[r][1], _mm_srai_epi16(x, 8));
  }
  asm("" : "+m"(pairs));  // broadcasts from memory cost no ALU operation; GCC would use registers
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const WidePairs wide = widen_unsigned(w[q]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) add_wide(sum[r], wide, pairs[r][0][q], pairs[r][1][q]);
  }
}

// sum[r] += w . x[r], over half a group (four quads). Products are summed in 16 bits while they fit: four quads of five
// bits give at most 4 * 2 * 31 * 127.
template <int kBits, int kRows>
[[gnu::always_inline]] inline void dot_half(const Bytes* w, const ActivationGroup* a, int half, Ints (&sum)[kRows]) {
  if constexpr (kBits == 8) {
    dot_half_wide(w, a, half, sum);
  } else {
    constexpr int kTogether = kBits <= 5 ? 4 : 2;
    static_assert(kTogether * 2 * ((1 << kBits) - 1) * 127 <= 32767);
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int begin = 0; begin < 4; begin += kTogether) {
      Shorts part[kRows];
#pragma GCC unroll 4
      for (int q = begin; q < begin + kTogether; ++q) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i x = broadcast_quad(a[r].q + 16 * half + 4 * q);
          const Shorts product = {_mm256_maddubs_epi16(w[q].lo, x), _mm256_maddubs_epi16(w[q].hi, x)};
          part[r] = q == begin ? product : add_shorts(part[r], product);
          keep_in_register(part[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        sum[r] = add(sum[r], {_mm256_madd_epi16(part[r].lo, ones), _mm256_madd_epi16(part[r].hi, ones)});
    }
  }
}

// sum[r] += a panel in the Hadamard form (hadamard_panel.h) . row r of a tile, given as codes, over blocks of at most
// kScaleCols columns. Four rows' accumulators of one panel take half of the registers.
template <int kRows>
inline void dot_panel(const uint8_t* weights, const int8_t* codes, int64_t quads, Ints (&sum)[kRows]) {
  static_assert(kTokenTile == 4);
  alignas(32) int32_t pairs[kScaleCols / 8][2][2][kTokenTile];  // [two quads][columns 0, 2 or 1, 3][quad][row]
  for (int64_t two = 0; two < quads / 2; ++two) {
    const __m256i x = load256(codes + two * 8 * kTokenTile);
    store256(pairs[two][0], _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    store256(pairs[two][1], _mm256_srai_epi16(x, 8));
  }
  Ints own[kRows];  // kept in registers, unlike the caller's array of several panels
  for (int r = 0; r < kRows; ++r) own[r] = sum[r];
  for (int64_t two = 0; two < quads / 2; ++two, weights += 2 * kVector) {
    const auto& [even, odd] = pairs[two];
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      const WidePairs wide = widen_unsigned(load_bytes(weights + q * kVector));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) add_wide(own[r], wide, even[q][r], odd[q][r]);
    }
  }
  for (int r = 0; r < kRows; ++r) sum[r] = own[r];
}

#endif

template <int kBits, int kRows, class First, class Take>
inline void dot_group(const Bytes (&w)[8], const ActivationGroup* a, const First& first, const Take& take) {
  Ints lo[kRows], hi[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) lo[r] = first(r, 0);
  dot_half<kBits>(w, a, 0, lo);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) hi[r] = first(r, 1);
  dot_half<kBits>(w + 4, a, 1, hi);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) take(r, lo[r], hi[r]);
}

}  // namespace
}  // namespace paged
