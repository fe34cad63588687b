// The vector primitives on AVX2 with FMA and F16C (and AVX-VNNI where compiled for it): two registers per 16 rows.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace paged {
namespace {

struct Bytes {
  __m256i lo, hi;
};
struct Ints {
  __m256i lo, hi;
};
struct Floats {
  __m256 lo, hi;
};
struct Shorts {
  __m256i lo, hi;
};

constexpr int kMaxTile = 4;    // 8 accumulators leave half of the 16 registers to weights and scales
constexpr int kDenseTile = 6;  // rows of a float product, times vectors of columns: 12 of 16 registers
constexpr int kDenseWide = 1;
constexpr int kDenseRows = 6;  // rows and panels of a product with dense weights: 12 of 16 registers
constexpr int kDensePanels = 1;
#ifdef __AVXVNNI__
constexpr int kTokenTile = 2;  // rows of a Hadamard product with two panels: 8 of 16 registers
constexpr bool kOnePanelAtATime = false;
constexpr int kCodesTogether = 4;
#else
constexpr int kTokenTile = 4;  // with one panel: 8 of 16 registers
constexpr bool kOnePanelAtATime = true;
constexpr int kCodesTogether = 4;
#endif

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store128(void* p, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }
inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

inline Bytes load_bytes(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
inline void store_bytes(uint8_t* p, Bytes a) {
  store256(p, a.lo);
  store256(p + 32, a.hi);
}
inline Bytes and_mask(Bytes a, int mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
template <int N>
inline Bytes shift_right(Bytes a) {
  return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)};
}
template <int N>
inline Bytes shift_left(Bytes a) {
  return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)};
}
inline Bytes merge(Bytes a, Bytes b, int mask) {
  const Bytes kept = and_mask(b, mask);
  return {_mm256_or_si256(a.lo, kept.lo), _mm256_or_si256(a.hi, kept.hi)};
}
// Looks up table[a] for each byte; all are below 16.
inline Bytes look_up(const uint8_t* table, Bytes a) {
  const __m256i levels = _mm256_broadcastsi128_si256(load128(table));
  return {_mm256_shuffle_epi8(levels, a.lo), _mm256_shuffle_epi8(levels, a.hi)};
}

// Forces the accumulator into registers now. Otherwise GCC computes all of a sum's products first and adds them as a
// tree, which spills to the stack and took 1.35 times as long in Q4_1 (four rows, AMD Zen 4).
template <class Vectors>
inline void keep_in_register(Vectors& sum) {
  asm("" : "+x"(sum.lo), "+x"(sum.hi));
}

inline Bytes add_bytes(Bytes a, Bytes b) { return {_mm256_add_epi8(a.lo, b.lo), _mm256_add_epi8(a.hi, b.hi)}; }
inline Bytes sub_bytes(Bytes a, Bytes b) { return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)}; }
inline Bytes sub_byte(Bytes a, int b) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(b));
  return {_mm256_sub_epi8(a.lo, v), _mm256_sub_epi8(a.hi, v)};
}
// Swaps the 16-bit halves of every 32 bits.
inline __m256i exchange_halves(__m256i a) {
  return _mm256_shuffle_epi8(a, _mm256_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2, 13, 12, 15, 14, 9,
                                                8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2));
}
inline Bytes butterfly_bytes(Bytes a) {
  const auto half = [](__m256i v) {
    const __m256i partner = exchange_halves(v);
    return _mm256_blend_epi16(_mm256_add_epi8(partner, v), _mm256_sub_epi8(partner, v), 0xaa);
  };
  return {half(a.lo), half(a.hi)};
}
template <int kFactor>
inline void widen(Bytes a, Shorts& sum, Shorts& difference) {
  const __m256i factor = _mm256_set1_epi8(kFactor), turn = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i signs = _mm256_set1_epi16(static_cast<short>((-kFactor * 256) | kFactor));
  sum = {_mm256_maddubs_epi16(factor, a.lo), _mm256_maddubs_epi16(factor, a.hi)};
  difference = {_mm256_maddubs_epi16(_mm256_xor_si256(a.lo, turn), signs),
                _mm256_maddubs_epi16(_mm256_xor_si256(a.hi, turn), signs)};
}
inline Shorts load_shorts(const int16_t* p) { return {load256(p), load256(p + 16)}; }
inline void store_shorts(int16_t* p, Shorts a) {
  store256(p, a.lo);
  store256(p + 16, a.hi);
}
inline Shorts add_shorts(Shorts a, Shorts b) { return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)}; }
inline Shorts sub_shorts(Shorts a, Shorts b) { return {_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi)}; }
inline Shorts butterfly_shorts(Shorts a) {
  const auto half = [](__m256i v) {
    const __m256i partner = exchange_halves(v);
    return _mm256_blend_epi16(_mm256_add_epi16(partner, v), _mm256_sub_epi16(partner, v), 0xaa);
  };
  return {half(a.lo), half(a.hi)};
}
inline Shorts broadcast_short(int a) {
  const __m256i v = _mm256_set1_epi16(static_cast<short>(a));
  return {v, v};
}
inline Shorts max_magnitude_short(Shorts so_far, Shorts a) {
  return {_mm256_max_epi16(so_far.lo, _mm256_abs_epi16(a.lo)), _mm256_max_epi16(so_far.hi, _mm256_abs_epi16(a.hi))};
}
inline Shorts multiply_high(Shorts a, Shorts b) {
  return {_mm256_mulhrs_epi16(a.lo, b.lo), _mm256_mulhrs_epi16(a.hi, b.hi)};
}
inline Ints larger_of_two(Shorts a) {
  const auto half = [](__m256i v) {
    return _mm256_and_si256(_mm256_max_epi16(v, _mm256_srli_epi32(v, 16)), _mm256_set1_epi32(0xffff));
  };
  return {half(a.lo), half(a.hi)};
}
inline Ints first_of_two(Shorts a) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(a.lo, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(a.hi, 16), 16)};
}
inline Shorts replace_first(Shorts a, Ints first) {
  return {_mm256_blend_epi16(a.lo, first.lo, 0x55), _mm256_blend_epi16(a.hi, first.hi, 0x55)};
}
inline Shorts twice(Ints a) {
  const auto half = [](__m256i v) { return _mm256_blend_epi16(v, _mm256_slli_epi32(v, 16), 0xaa); };
  return {half(a.lo), half(a.hi)};
}
inline Bytes join_bytes(Shorts even, Shorts odd) {
  const auto half = [](__m256i a, __m256i b) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi16(0xff));
    return _mm256_xor_si256(_mm256_or_si256(low, _mm256_slli_epi16(b, 8)), _mm256_set1_epi8(static_cast<char>(0x80)));
  };
  return {half(even.lo, odd.lo), half(even.hi, odd.hi)};
}

inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
template <int N>
inline Ints broadcast_shifted(const int32_t* p) {
  const __m256i a = _mm256_slli_epi32(_mm256_set1_epi32(*p), N);
  return {a, a};
}
template <bool kEightBit>
inline __m256i dot4_half(__m256i sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
  if constexpr (kEightBit) {
    // Two products of 8-bit weights overflow maddubs' 16-bit sum, so even and odd bytes are widened separately.
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  } else {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  }
#endif
}
template <bool kEightBit>
inline Ints dot4(Ints sum, Bytes w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const __m256i b = _mm256_set1_epi32(four);
  return {dot4_half<kEightBit>(sum.lo, w.lo, b), dot4_half<kEightBit>(sum.hi, w.hi, b)};
}
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline int32_t sum_of(Ints a) {
  const __m256i b = _mm256_add_epi32(a.lo, a.hi);
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1));
  return _mm_cvtsi128_si32(c);
}
inline void store_int8(int8_t* p, Ints a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  store128(p, bytes);
}
inline void store_int16(int16_t* p, Ints a) {
  store256(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8));
}
// Interleaves 16 numbers of two rows into pairs.
inline void store_pairs(int16_t* p, const int16_t* first, const int16_t* second) {
  for (int i = 0; i < 16; i += 8) {
    const __m128i a = load128(first + i), b = load128(second + i);
    store128(p + 2 * i, _mm_unpacklo_epi16(a, b));
    store128(p + 2 * i + 8, _mm_unpackhi_epi16(a, b));
  }
}
// Broadcasts a pair of 16-bit numbers to all rows.
inline Shorts broadcast_pair(const int16_t* p) {
  int32_t two;
  __builtin_memcpy(&two, p, 4);
  const __m256i pair = _mm256_set1_epi32(two);
  return {pair, pair};
}
// sum[row] += a[row, 0] b[row, 0] + a[row, 1] b[row, 1]
inline Ints dot_pairs(Ints sum, Shorts a, Shorts b) {
#ifdef __AVXVNNI__
  return {_mm256_dpwssd_avx_epi32(sum.lo, a.lo, b.lo), _mm256_dpwssd_avx_epi32(sum.hi, a.hi, b.hi)};
#else
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
#endif
}
// Stores 16 columns of a tile's rows as [4 quads][kTokenTile][4] codes, all within int8.
inline void store_quads(int8_t* p, const Ints (&rows)[kTokenTile]) {
#ifdef __AVXVNNI__
  const __m256i low = _mm256_packs_epi32(rows[0].lo, rows[1].lo), high = _mm256_packs_epi32(rows[0].hi, rows[1].hi);
  const __m256i even_odd = _mm256_packs_epi16(low, high);  // quads 0, 2 | 1, 3
  store256(p, _mm256_permute4x64_epi64(even_odd, 0xd8));
#else
  const auto two_quads = [](__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  };
  store256(p, two_quads(rows[0].lo, rows[1].lo, rows[2].lo, rows[3].lo));
  store256(p + 32, two_quads(rows[0].hi, rows[1].hi, rows[2].hi, rows[3].hi));
#endif
}

inline void store_uint8(uint8_t* p, Ints a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  store128(p, bytes);
}

inline Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats broadcast(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_floats(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Floats load_half(const uint8_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))}; }
inline Floats load_bfloat16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p + 8)), 16))};
}
inline void store_bfloat16(uint16_t* p, Floats a) {
  const auto rounded = [](__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(nearest, 16), _mm256_or_si256(top, _mm256_set1_epi32(0x40)), is_nan);
  };
  const __m256i packed = _mm256_packus_epi32(rounded(a.lo), rounded(a.hi));
  store256(p, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_half(uint16_t* p, Floats a) {
  store128(p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  store128(p + 8, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats load_even_bfloat16(const uint8_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load256(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load256(p + 32), 16))};
}
inline Floats load_odd_bfloat16(const uint8_t* p) {
  // Accumulators need 12 of 16 registers. So this uses two shifts instead of a mask, and hides p from the compiler,
  // which would otherwise keep load_even_bfloat16's loads in registers.
  asm("" : "+r"(p));
  const auto odd = [](__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pairs, 16), 16));
  };
  return {odd(load256(p)), odd(load256(p + 32))};
}
inline Floats load_uint8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p + 8)))};
}
inline Floats load_int8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p + 8)))};
}
// Loads 16 lower or upper halves of bytes.
template <bool kUpper>
inline Floats load_nibbles(const uint8_t* p) {
  const auto half = [](const uint8_t* eight) {
    const __m256i bytes = _mm256_cvtepu8_epi32(load64(eight));
    return _mm256_cvtepi32_ps(kUpper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
  };
  return {half(p), half(p + 8)};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Floats as_floats(Ints bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }
inline Ints to_nearest(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats minimum(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Floats maximum(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline float sum_of(Floats a) {
  const __m256 b = _mm256_add_ps(a.lo, a.hi);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float max_of(Floats a) {
  const __m256 b = _mm256_max_ps(a.lo, a.hi);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
inline Ints max_magnitude(Ints so_far, Floats a) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_max_epi32(so_far.lo, _mm256_and_si256(_mm256_castps_si256(a.lo), mask)),
          _mm256_max_epi32(so_far.hi, _mm256_and_si256(_mm256_castps_si256(a.hi), mask))};
}
inline int32_t max_of(Ints a) {
  const __m256i m = _mm256_max_epi32(a.lo, a.hi);
  __m128i c = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  c = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  c = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1));
  return _mm_cvtsi128_si32(c);
}
// n is within [-126, 127] and is added to the exponent bits.
inline Floats scale_by_power(Floats p, Floats n) {
  const auto power = [](__m256 a, __m256 b) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(b), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
  };
  return {power(p.lo, n.lo), power(p.hi, n.hi)};
}
inline Floats round_to_4_bits(Floats a) {
  const auto rounded = [](__m256 v) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(0x80000));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(~0xfffff)));
  };
  return {rounded(a.lo), rounded(a.hi)};
}
inline Floats floor_of(Floats a) {
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kDown), _mm256_round_ps(a.hi, kDown)};
}
// fraction is a - floor(a); scale_by_floor is p * 2^floor(a).
inline Floats fraction(Floats a) { return sub(a, floor_of(a)); }
inline Floats scale_by_floor(Floats p, Floats a) { return scale_by_power(p, floor_of(a)); }
inline Floats round_to_integral(Floats a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}

inline Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
inline Floats zero_unless_above(Floats x, float limit, Floats value) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, bound, _CMP_NLE_UQ), value.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, bound, _CMP_NLE_UQ), value.hi)};
}
// Loads 16 f8e4m3 values times 1 / 256: sign, exponent and mantissa move to the same places of a float16.
inline Floats load_float8(const uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
template <int kStride>
inline Floats butterfly(Floats a) {
  static_assert(kStride == 1 || kStride == 2 || kStride == 4 || kStride == 8);
  if constexpr (kStride == 8) {
    return {_mm256_add_ps(a.lo, a.hi), _mm256_sub_ps(a.lo, a.hi)};
  } else {
    constexpr int kUpper = kStride == 4 ? 0xf0 : kStride == 2 ? 0xcc : 0xaa;
    const auto half = [](__m256 v) {
      __m256 partner;
      if constexpr (kStride == 4) partner = _mm256_permute2f128_ps(v, v, 1);
      if constexpr (kStride == 2) partner = _mm256_permute_ps(v, 0x4e);
      if constexpr (kStride == 1) partner = _mm256_permute_ps(v, 0xb1);
      return _mm256_blend_ps(_mm256_add_ps(v, partner), _mm256_sub_ps(partner, v), kUpper);
    };
    return {half(a.lo), half(a.hi)};
  }
}
inline void transpose8(__m256 rows[8]) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}
inline void transpose(Floats rows[16]) {
  __m256 quarters[4][8];
  for (int i = 0; i < 8; ++i) {
    quarters[0][i] = rows[i].lo;
    quarters[1][i] = rows[i].hi;
    quarters[2][i] = rows[i + 8].lo;
    quarters[3][i] = rows[i + 8].hi;
  }
  for (auto& quarter : quarters) transpose8(quarter);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarters[0][i], quarters[2][i]};
    rows[i + 8] = {quarters[1][i], quarters[3][i]};
  }
}

// sums_of returns the sum of each of 16 vectors, which store_lanes stored as eight sums of two lanes each.
constexpr int kSumLanes = 8;
inline void store_lanes(float* p, Floats a) { _mm256_storeu_ps(p, _mm256_add_ps(a.lo, a.hi)); }
inline Floats sums_of(const float (*vectors)[kSumLanes]) {
  const auto two = [](const float* p, const float* q) {  // sums of four lanes of p, then of q
    const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(q);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto eight = [two](const float (*v)[kSumLanes]) {
    const auto four = [two, v](int i) {
      const __m256 a = two(v[i], v[i + 4]), b = two(v[i + 1], v[i + 5]);
      return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    };
    const __m256 a = four(0), b = four(2);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  };
  return {eight(vectors), eight(vectors + 8)};
}

}  // namespace
}  // namespace paged
