// Picks the vector primitives of the instruction set that this translation unit is compiled for.
//
// Everything below has internal linkage: the same kernels are compiled once per instruction set, and the linker must
// never take one set's copy of an inline function for another's.
#pragma once

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
