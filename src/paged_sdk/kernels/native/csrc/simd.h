// Selects the vector primitives of the ISA level that this translation unit is compiled for.
//
// Everything below has internal linkage: the same kernels are compiled once per ISA level, and the linker must never
// replace one level's copy of an inline function by another's.
#pragma once

#include <cstdint>

namespace paged {
namespace {

inline uint32_t bits_of(float a) {
  uint32_t b;
  __builtin_memcpy(&b, &a, 4);
  return b;
}
inline float from_bits(uint32_t b) {
  float a;
  __builtin_memcpy(&a, &b, 4);
  return a;
}
inline uint16_t to_bfloat16(float a) {
  const uint32_t bits = bits_of(a);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Multiplication rebases the exponent, which is exact for subnormal halves too.
  return from_bits(bits_of(from_bits(magnitude << 13) * from_bits(0x77800000)) | sign);
}
// Rounds to nearest even; Inf from 65520 on.
inline uint16_t to_half(float a) {
  const uint32_t sign = bits_of(a) >> 16 & 0x8000, magnitude = bits_of(a) & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (magnitude < 0x38800000)  // below 2^-14 the step is 2^-24, the last bit of a float32 near 1/2
    return static_cast<uint16_t>(sign | (bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10)));
}

}  // namespace
}  // namespace paged

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace paged {
namespace {

#if !defined(__ARM_FEATURE_DOTPROD)
// Whether dot products subtract the 128 that is added to stored 8-bit weights. Otherwise a sum starts at -128 times the
// sum of the other factors.
constexpr bool kDotSubtracts128 = false;
#endif

// Loads the first `count` numbers, padded with zeros.
inline Floats load_first(const float* p, int count) {
  alignas(64) float values[16] = {};
  __builtin_memcpy(values, p, sizeof(float) * count);
  return load_floats(values);
}

// Returns the bits of max |a|; NaN and Inf compare above every number.
inline uint32_t magnitude_bits(Floats a) { return static_cast<uint32_t>(max_of(max_magnitude(zero_ints(), a))); }

}  // namespace
}  // namespace paged
