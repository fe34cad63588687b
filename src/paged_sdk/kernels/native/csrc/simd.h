// Picks the vector primitives of the instruction set that this translation unit is compiled for.
//
// Everything below has internal linkage: the same kernels are compiled once per instruction set, and the linker must
// never take one set's copy of an inline function for another's.
#pragma once

#include <cstdint>

namespace paged {
namespace {

inline uint16_t to_bfloat16(float a) {
  uint32_t bits;
  __builtin_memcpy(&bits, &a, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace
}  // namespace paged

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace paged {
namespace {

// The bits of max |a|: NaN and Inf compare above every number.
inline uint32_t magnitude_bits(Floats a) { return static_cast<uint32_t>(max_of(max_magnitude(zero_ints(), a))); }

}  // namespace
}  // namespace paged
