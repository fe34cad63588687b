// The vector primitives on AVX-512 with VNNI: 16 rows of a panel fill one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace paged {
namespace {

using Bytes = __m512i;  // 64 unsigned bytes: 16 rows x 4 consecutive k
using Ints = __m512i;   // 16 int32
using Floats = __m512;  // 16 float32
using Shorts = __m512i;  // 32 int16: 16 rows x 2

constexpr int kMaxTile = 16;  // activation rows: 16 accumulators + 8 weight vectors + scales fit 32 registers
constexpr int kDenseTile = 12;  // rows of a float product, times vectors of columns: 24 accumulators
constexpr int kDenseWide = 2;
constexpr int kDenseRows = 6;  // rows and panels of a product with dense weights: 24 accumulators
constexpr int kDensePanels = 4;
#if defined(__AMX_INT8__)
constexpr int kTokenTile = 32;  // activation rows of a Hadamard product, times two panels: four tiles of 16 x 16 sums
constexpr int kCodesTogether = 64;  // adjacent columns of a row
#else
constexpr int kTokenTile = 8;  // activation rows of a Hadamard product, times two panels: 16 accumulators
constexpr int kCodesTogether = 4;
#endif
constexpr bool kOnePanelAtATime = false;

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
inline Bytes and_mask(Bytes a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask))); }
template <int N>
inline Bytes shift_right(Bytes a) {  // shifts cross bytes within 16-bit lanes; the caller masks
  return _mm512_srli_epi16(a, N);
}
template <int N>
inline Bytes shift_left(Bytes a) {
  return _mm512_slli_epi16(a, N);
}
// a | (b & mask)
inline Bytes merge(Bytes a, Bytes b, int mask) {
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(static_cast<char>(mask)), 0xF8);
}

// Looks up table[a] for each byte; all are below 16.
inline Bytes look_up(const uint8_t* table, Bytes a) {
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), a);
}

// Operations of a Hadamard transform on bytes and 16-bit numbers. Sums wrap around.
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes sub_bytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
inline Bytes sub_byte(Bytes a, int b) { return _mm512_sub_epi8(a, _mm512_set1_epi8(static_cast<char>(b))); }
// Within every four bytes, replaces bytes two apart by their sum and difference.
inline Bytes butterfly_bytes(Bytes a) {
  const __m512i partner = _mm512_rol_epi32(a, 16);
  return _mm512_mask_sub_epi8(_mm512_add_epi8(partner, a), 0xcccccccccccccccc, partner, a);
}
// Returns kFactor times the sum and the difference of neighbouring signed bytes.
template <int kFactor>
inline void widen(Bytes a, Shorts& sum, Shorts& difference) {
  const __m512i signs = _mm512_set1_epi16(static_cast<short>((-kFactor * 256) | kFactor));
  sum = _mm512_maddubs_epi16(_mm512_set1_epi8(kFactor), a);
  difference = _mm512_maddubs_epi16(_mm512_xor_si512(a, _mm512_set1_epi8(static_cast<char>(0x80))), signs);
}
inline Shorts load_shorts(const int16_t* p) { return _mm512_load_si512(p); }
inline void store_shorts(int16_t* p, Shorts a) { _mm512_store_si512(p, a); }
inline Shorts add_shorts(Shorts a, Shorts b) { return _mm512_add_epi16(a, b); }
inline Shorts sub_shorts(Shorts a, Shorts b) { return _mm512_sub_epi16(a, b); }
// Replaces the two numbers of each row by their sum and difference.
inline Shorts butterfly_shorts(Shorts a) {
  const __m512i partner = _mm512_rol_epi32(a, 16);
  return _mm512_mask_sub_epi16(_mm512_add_epi16(partner, a), 0xaaaaaaaa, partner, a);
}
inline Shorts broadcast_short(int a) { return _mm512_set1_epi16(static_cast<short>(a)); }
inline Shorts max_magnitude_short(Shorts so_far, Shorts a) { return _mm512_max_epi16(so_far, _mm512_abs_epi16(a)); }
// a * b / 2^15, rounded to nearest
inline Shorts multiply_high(Shorts a, Shorts b) { return _mm512_mulhrs_epi16(a, b); }
// Returns the larger of each row's two numbers, which are not negative.
inline Ints larger_of_two(Shorts a) {
  return _mm512_and_si512(_mm512_max_epi16(a, _mm512_srli_epi32(a, 16)), _mm512_set1_epi32(0xffff));
}
// Returns each row's first number.
inline Ints first_of_two(Shorts a) { return _mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16); }
inline Shorts replace_first(Shorts a, Ints first) { return _mm512_mask_mov_epi16(a, 0x55555555, first); }
// Duplicates each 16-bit number.
inline Shorts twice(Ints a) {
  return _mm512_or_si512(_mm512_slli_epi32(a, 16), _mm512_and_si512(a, _mm512_set1_epi32(0xffff)));
}
// Joins int8 numbers to bytes, even ones from `even`, odd ones from `odd`, plus 128 except for AMX.
inline Bytes join_bytes(Shorts even, Shorts odd) {
  const __m512i joined = _mm512_mask_mov_epi8(even, 0xaaaaaaaaaaaaaaaa, _mm512_slli_epi16(odd, 8));
#if defined(__AMX_INT8__)
  return joined;
#else
  return _mm512_xor_si512(joined, _mm512_set1_epi8(static_cast<char>(0x80)));
#endif
}

inline Ints zero_ints() { return _mm512_setzero_si512(); }
template <int N>
inline Ints broadcast_shifted(const int32_t* p) {
  return _mm512_slli_epi32(_mm512_set1_epi32(*p), N);
}
// sum[row] += w[row, 0..3] . x[0..3]; every ISA level gives the same integers.
template <bool kEightBit>
inline Ints dot4(Ints sum, Bytes w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a); }
inline void store_int8(int8_t* p, Ints a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
#if !defined(__AMX_INT8__)
// Stores 16 columns of a tile's rows as [4 quads][kTokenTile][4] codes, all within int8.
inline void store_quads(int8_t* p, const Ints (&rows)[kTokenTile]) {
  const auto pack_four = [&rows](int i) {  // lane l is quad l of four rows
    return _mm512_packs_epi16(_mm512_packs_epi32(rows[i], rows[i + 1]), _mm512_packs_epi32(rows[i + 2], rows[i + 3]));
  };
  const __m512i a = pack_four(0), b = pack_four(4);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b));
  _mm512_storeu_si512(p + 64, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b));
}
#endif

inline void store_uint8(uint8_t* p, Ints a) { store_int8(reinterpret_cast<int8_t*>(p), a); }

inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Floats broadcast(float a) { return _mm512_set1_ps(a); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_bfloat16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store_bfloat16(uint16_t* p, Floats a) {
  const __m512i bits = _mm512_castps_si512(a), top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i rounded = _mm512_mask_or_epi32(_mm512_srli_epi32(nearest, 16), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q),
                                               top, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store_half(uint16_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
// Load the first, or the second, of 16 pairs of bfloat16 numbers.
inline Floats load_even_bfloat16(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline Floats load_odd_bfloat16(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(~0xffff)));
}
inline Floats load_uint8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Floats load_int8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Loads 16 lower or upper halves of bytes.
template <bool kUpper>
inline Floats load_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(kUpper ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(15)));
}
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }
inline Ints to_nearest(Floats a) { return _mm512_cvtps_epi32(a); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// Both return NaN where b is NaN.
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Floats a) { return _mm512_reduce_max_ps(a); }
// Returns the larger of so_far and the bits of |a|, lane by lane; NaN and Inf compare above every number.
inline Ints max_magnitude(Ints so_far, Floats a) {
  return _mm512_max_epi32(so_far, _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
inline int32_t max_of(Ints a) { return _mm512_reduce_max_epi32(a); }
// p * 2^n for an integral n
inline Floats scale_by_power(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }
// Rounds to 4 significant bits, ties away from zero.
inline Floats round_to_4_bits(Floats a) {
  const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x80000));
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(~0xfffff)));
}
// fraction is a - floor(a); scale_by_floor is p * 2^floor(a). One instruction each.
inline Floats fraction(Floats a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Floats scale_by_floor(Floats p, Floats a) { return _mm512_scalef_ps(p, a); }
inline Floats round_to_integral(Floats a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// yes where a > b, else no
inline Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
// value where x > limit or x is NaN, else 0
inline Floats zero_unless_above(Floats x, float limit, Floats value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLE_UQ), value);
}
#if defined(__AVX512BF16__)
using Pairs = __m512i;  // 16 pairs of bfloat16

inline Pairs load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Pairs broadcast_pair(uint32_t a) { return _mm512_set1_epi32(static_cast<int32_t>(a)); }
// sum + a.first * b.first + a.second * b.second; subnormal numbers count as zero.
inline Floats dot_pairs(Pairs a, Pairs b, Floats sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline __m256i round_to_bfloat16(Floats a) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)); }
// Rounds 32 numbers: first's, then second's.
inline Pairs side_by_side(Floats first, Floats second) {
  return reinterpret_cast<Pairs>(_mm512_cvtne2ps_pbh(second, first));
}
// Rounds to pairs (first, second) lane by lane, ties away from zero. With the hardware's rounding and a permutation,
// weights of 16 rows and 128 keys took 212 ns instead of 193.
inline Pairs lane_by_lane(Floats first, Floats second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  return _mm512_ternarylogic_epi32(high, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)), low, 0xea);
}
// Stores 16 numbers as 8 adjacent pairs, for dot_pairs.
inline void store_pairs(uint16_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bfloat16(a));
}
#endif

// Loads 16 f8e4m3 values times 1 / 256: sign, exponent and mantissa move to the same places of a float16.
inline Floats load_float8(const uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff))));
}
// Replaces lanes i and i + kStride by their sum and difference.
template <int kStride>
inline Floats butterfly(Floats a) {
  static_assert(kStride == 1 || kStride == 2 || kStride == 4 || kStride == 8);
  Floats partner;
  if constexpr (kStride == 8) partner = _mm512_shuffle_f32x4(a, a, 0x4e);
  if constexpr (kStride == 4) partner = _mm512_shuffle_f32x4(a, a, 0xb1);
  if constexpr (kStride == 2) partner = _mm512_permute_ps(a, 0x4e);
  if constexpr (kStride == 1) partner = _mm512_permute_ps(a, 0xb1);
  constexpr __mmask16 kUpper = kStride == 8 ? 0xff00 : kStride == 4 ? 0xf0f0 : kStride == 2 ? 0xcccc : 0xaaaa;
  // An FMA rounds once, as an addition does, and takes a third fewer instructions than addition, subtraction and blend.
  const Floats signs = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), kUpper, _mm512_set1_ps(-1.0f));
  return _mm512_fmadd_ps(a, signs, partner);
}
// Transposes rows and columns.
inline void transpose(Floats rows[16]) {
  Floats pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {  // lane l of quads[4 i + j] holds column 4 l + j of rows 4 i ... 4 i + 3
    const Floats even_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
    const Floats even_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
    const Floats odd_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xdd);
    const Floats odd_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

// sums_of returns the sum of each of 16 vectors.
constexpr int kSumLanes = 16;
inline void store_lanes(float* p, Floats a) { store_floats(p, a); }
inline Floats sums_of(const float (*vectors)[kSumLanes]) {
  Floats halves[8], quarters[4];  // eight partial sums of two vectors each; four partial sums of four vectors each
  for (int i = 0; i < 8; ++i) {
    const Floats a = load_floats(vectors[i]), b = load_floats(vectors[i + 8]);
    halves[i] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    const Floats a = halves[i], b = halves[i + 4];
    quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const auto pairs = [](Floats a, Floats b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const Floats first = pairs(quarters[0], quarters[1]), second = pairs(quarters[2], quarters[3]);
  const Floats sums = add(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
  return _mm512_shuffle_f32x4(sums, sums, 0xd8);
}

}  // namespace
}  // namespace paged
