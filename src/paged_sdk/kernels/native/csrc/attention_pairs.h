// Shared by the attention kernels on AVX-512: few rows on bfloat16 pairs (attention_few.h) or codes
// (attention_few_q4.h), and tiles on bfloat16 pairs (attention_bf16.h, or attention_amx.h on AMX).
#pragma once

#include "attention.h"

namespace paged {
namespace {

// Whether tiles of these heads are multiplied as bfloat16 pairs.
inline bool has_pairs(const paged_heads& heads) {
#if defined(__AVX512BF16__)
  return heads.products != PAGED_FLOAT32_PRODUCTS;
#else
  (void)heads;
  return false;
#endif
}

#if defined(__AVX512BF16__)

constexpr int kSpanPairs = kSpan / 2;
constexpr int kPairKeys = 32;  // keys are packed and scored 32 at a time

// Loads 16 elements of a cached vector as bfloat16.
inline __m256i load_sixteen(const Pages& pages, const void* data, const void* scales, int64_t vector, int c) {
  if (pages.heads.cache_dtype == PAGED_BFLOAT16)
    return _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(data) + vector * pages.heads.head_dim + c));
  return round_to_bfloat16(pages.load(data, scales, vector, c));
}

// Rounds 16 weights to pairs.
inline void store_weights(uint32_t* weights, int i, Floats weight) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i / 2), round_to_bfloat16(weight));
}

#endif

#if defined(__AVX512VNNI__)

// Transposes 4 x 4 numbers in each 128-bit lane.
inline void transpose_lanes(__m512i k[4]) {
  const __m512i ab_low = _mm512_unpacklo_epi32(k[0], k[1]), ab_high = _mm512_unpackhi_epi32(k[0], k[1]);
  const __m512i cd_low = _mm512_unpacklo_epi32(k[2], k[3]), cd_high = _mm512_unpackhi_epi32(k[2], k[3]);
  k[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  k[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  k[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  k[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

// Computes a row's weights from its scores of a span's first `width` keys, of which it sees [begin, end), and rescales
// the row's state. store(i, weights) takes those of 16 keys from i on.
template <class Store>
inline void weigh_row(float* scores, int width, int begin, int end, const paged_heads& heads, float& row_maximum,
                      float& row_sum, float* values, const Store& store) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const bool whole = begin <= 0 && end >= width;
  Floats s[kSpan / 16], most = broadcast(2.0f * kMaskedScore);
#pragma GCC unroll 8
  for (int i = 0; i < kSpan / 16; ++i) {
    if (16 * i >= width) break;
    s[i] = load_floats(scores + 16 * i);
    if (heads.softcap > 0.0f) s[i] = mul(broadcast(kLog2E), soft_cap(s[i], heads.softcap));
    if (!whole) {
      const __mmask16 seen = _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(begin - 16 * i), _MM_CMPINT_NLT) &
                             _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(end - 16 * i), _MM_CMPINT_LT);
      s[i] = _mm512_mask_mov_ps(broadcast(2.0f * kMaskedScore), seen, s[i]);
    }
    most = maximum(most, s[i]);
  }
  const float before = row_maximum, here = max_of(most);
  const float highest = here > before ? here : before;
  Floats total = zero_floats();
#pragma GCC unroll 8
  for (int i = 0; i < kSpan / 16; ++i) {
    if (16 * i >= width) break;
    const Floats weight = rough_exponential2(sub(s[i], broadcast(highest)));
    total = add(total, weight);
    store(16 * i, weight);
  }
  if (highest != before) {
    const Floats factor = exponential2(broadcast(before - highest));
    row_sum *= _mm512_cvtss_f32(factor);
    for (int c = 0; c < heads.head_dim; c += 16) store_floats(values + c, mul(load_floats(values + c), factor));
    row_maximum = highest;
  }
  row_sum += sum_of(total);
}

#endif

}  // namespace
}  // namespace paged
