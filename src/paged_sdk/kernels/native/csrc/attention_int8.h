// Attention of a tile of query rows by dot products of int8 codes, accumulated in int32: twice the rate of bfloat16
// pairs.
//
// Each query, key and value has its own scale. The first coded key of a span is subtracted from the span's keys before
// they are quantized, which removes what they have in common; a row's product with that key is added to its scores.
// SageAttention (Zhang et al., 2024, arXiv 2410.02367) subtracts the mean; a key is used here because it exists
// wherever a chunk ends. Queries and keys are then rotated by a Hadamard transform of every 16 elements (QuaRot,
// Ashkboos et al., 2024, arXiv 2404.00456), which spreads outliers, unless the cache has done so. A row's weights in a
// span become bytes: the largest product of a weight and its value's scale is at most 255. The sequence's first key is
// not quantized: see begin_with_first_key.
//
// Mean KL of a prompt's logits from float32, Qwen2.5-Coder-1.5B, 384 tokens: 0.0100 with plain keys, 0.0012 after
// subtracting a key, 0.0010 with the rotation as well, and 0.0008 with exact scores. SmolLM2-135M, 768 tokens: 0.0044
// with the first key quantized like the others, 0.0036 with it apart, and 0.0033 with exact attention.
//
// The codes of a span of 128 keys and their values are made once and shared by all rows of the tile: the tokens of a
// chunk times the query heads of one KV head. Spans start at fixed positions, a key's codes depend only on that key and
// the first coded one of its span, and a row's sums have one order, so a row's result depends neither on the tile nor
// on how a prompt is cut into chunks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "functions.h"
#include "hadamard.h"

// With AMX, products of bfloat16 pairs (attention_amx.h) take 0.8 to 0.9 of the time of int8 codes, and round less.
#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
#define PAGED_HAS_CODES
#endif

namespace paged {
namespace {

constexpr int kLargestCodedHead = 256;  // its elements just about fit the registers

// Whether this header serves tiles of these heads.
inline bool has_codes(const paged_heads& heads) {
#if defined(PAGED_HAS_CODES)
  return heads.products == PAGED_INT8_PRODUCTS && heads.head_dim <= kLargestCodedHead;
#else
  (void)heads;
  return false;
#endif
}

#if defined(PAGED_HAS_CODES)

constexpr int kCodeRows = kDenseTile;  // rows whose scores are held together
constexpr int kCodeKeys = 32;          // keys are scored 32 at a time

// A thread's scratch memory for a tile.
struct CodeScratch {
  float* queries;        // [rows, head_dim], scaled
  float* query_scales;   // [rows]
  int32_t* query_sums;   // [rows]: -128 times the sum of a row's codes
  float* scores;         // [kCodeRows, 128]
  float* key_scales;     // [128]
  float* value_scales;   // [128]
  float* code_scales;    // [128]: value scales in units of a weight's code
  float* common_key;     // [head_dim]: subtracted from keys before they are quantized
  float* factors;        // [2, kCodeRows]: for a row's state, and for what a span adds
  int8_t* query_codes;   // [rows, head_dim]
  uint8_t* keys;         // [head_dim / 4, 128, 4]: codes plus 128
  int8_t* values;        // [128 / 4, head_dim, 4]
  uint8_t* weights;      // [kCodeRows, 128]
  int8_t* rows_of_codes;  // [16, head_dim]

  static size_t floats(int rows, int head_dim) {
    Arena arena(nullptr);
    at(arena, rows, head_dim);
    return arena.used() / sizeof(float);
  }
  static CodeScratch at(Arena& arena, int rows, int head_dim) {
    const size_t elements = static_cast<size_t>(rows) * head_dim, span = static_cast<size_t>(kSpan) * head_dim;
    CodeScratch s;
    s.queries = arena.take<float>(elements);
    s.query_scales = arena.take<float>(rows);
    s.query_sums = arena.take<int32_t>(rows);
    s.scores = arena.take<float>(kCodeRows * kSpan);
    s.key_scales = arena.take<float>(kSpan);
    s.value_scales = arena.take<float>(kSpan);
    s.code_scales = arena.take<float>(kSpan);
    s.common_key = arena.take<float>(head_dim);
    s.factors = arena.take<float>(2 * kCodeRows);
    s.query_codes = arena.take<int8_t>(elements);
    s.keys = arena.take<uint8_t>(span);
    s.values = arena.take<int8_t>(span);
    s.weights = arena.take<uint8_t>(kCodeRows * kSpan);
    s.rows_of_codes = arena.take<int8_t>(16 * head_dim);
    return s;
  }
};

// Calls take(integral_constant<size>) for common head sizes, whose elements fit registers; 0 for other sizes.
template <class Take>
inline void with_head_dim(int size, const Take& take) {
  if (size == 64) return take(std::integral_constant<int, 64>{});
  if (size == 128) return take(std::integral_constant<int, 128>{});
  take(std::integral_constant<int, 0>{});
}

// Quantizes a vector, of which load(c) returns 16 elements, and sums its codes; returns its scale. kSize is its size,
// or 0.
template <int kSize, class Load>
inline float code_vector(int size, const Load& load, int8_t* codes, int32_t* sum = nullptr) {
  constexpr int kMost = (kSize > 0 ? kSize : kLargestCodedHead) / 16;
  Floats v[kMost];
  Ints largest = zero_ints(), sums = zero_ints();
  const int count = kSize > 0 ? kMost : size / 16;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    v[i] = load(16 * i);
    largest = max_magnitude(largest, v[i]);
  }
  const auto bits = static_cast<uint32_t>(max_of(largest));
  const float scale = unit_of(bits);
  if (scale > 0.0f) {
    const Floats factor = broadcast(127.0f / from_bits(bits));
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const Ints here = to_nearest(mul(v[i], factor));
      sums = add(sums, here);
      store_int8(codes + 16 * i, here);
    }
  } else {  // or NaN
    __builtin_memset(codes, 0, size);
  }
  if (sum != nullptr) *sum = sum_of(sums);
  return scale;
}

// Multiplies 16 elements by Sylvester's Hadamard matrix, which makes the vector four times as long.
inline Floats hadamard_16(Floats a) { return butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(a)))); }

// Whether queries and keys are transformed. 4-bit pages are in a basis that spreads outliers over whole heads already,
// by a transform of which this one would undo a part.
inline bool is_transformed(int32_t cache_dtype) { return cache_dtype != PAGED_Q4; }

// Quantizes the tile's queries in scratch.queries. Their scales undo the factor of 16 by which the transform enlarges
// products of queries and keys.
inline void code_queries(int rows, const paged_heads& heads, const CodeScratch& scratch) {
  const int size = heads.head_dim;
  const bool transformed = is_transformed(heads.cache_dtype);
  for (int r = 0; r < rows; ++r) {
    const float* query = scratch.queries + r * size;
    int32_t sum;
    const auto load = [&](int c) {
      const Floats plain = load_floats(query + c);
      return transformed ? hadamard_16(plain) : plain;
    };
    const float scale = code_vector<0>(size, load, scratch.query_codes + r * size, &sum);
    scratch.query_scales[r] = transformed ? scale / 16.0f : scale;
    scratch.query_sums[r] = -128 * sum;
  }
}

// Quantizes keys begin ... end - 1 of the span at `first`, and their values. Positions outside get codes and scales of
// zero and are never read. Only the first `width` keys of the span, a multiple of 32, are processed. `less_first`
// subtracts the first of them.
template <class Cached, int kSize>
inline void code_span_of(const Pages& pages, int first, int begin, int end, int width, bool less_first,
                         const CodeScratch& out) {
  const paged_cache& cache = pages.cache;
  const int size = kSize > 0 ? kSize : pages.heads.head_dim;
  int64_t vectors[kSpan];
  pages.vectors_of(begin, end, vectors + begin - first);
  const auto key = [&](int i, int c) {
    return load_cached<Cached>(cache.key, cache.key_scale, vectors[i], size, c);
  };
  const auto value = [&](int i, int c) {
    return load_cached<Cached>(cache.value, cache.value_scale, vectors[i], size, c);
  };
  for (int c = 0; c < size; c += 16)
    store_floats(out.common_key + c, less_first && begin < end ? key(begin - first, c) : zero_floats());
  int8_t* codes = out.rows_of_codes;
  // Quantizes vector i if it is present; load(c) returns 16 of its elements.
  const auto code = [&](int i, float* scales, int8_t* to, const auto& load) {
    if (i >= begin - first && i < end - first) {
      scales[i] = code_vector<kSize>(size, load, to);
    } else {
      scales[i] = 0.0f;
      __builtin_memset(to, 0, size);
    }
  };
  for (int i = 0; i < width; i += 16) {
    for (int k = 0; k < 16; ++k)
      code(i + k, out.key_scales, codes + k * size, [&](int c) {
        const Floats own = sub(key(i + k, c), load_floats(out.common_key + c));
        return std::is_same_v<Cached, CachedQ4> ? own : hadamard_16(own);
      });
    for (int c = 0; c < size; c += 64) {
      Floats rows[16];  // a lane holds four codes
      const int count = std::min(size - c, 64) / 4;
      for (int k = 0; k < 16; ++k) {
        const Ints four = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), codes + k * size + c);
        rows[k] = as_floats(_mm512_xor_si512(four, _mm512_set1_epi8(static_cast<char>(0x80))));
      }
      transpose(rows);
      for (int q = 0; q < count; ++q)
        store_floats(reinterpret_cast<float*>(out.keys + ((c / 4 + q) * kSpan + i) * 4), rows[q]);
    }
  }
  for (int i = 0; i < width; i += 4) {
    for (int k = 0; k < 4; ++k)
      code(i + k, out.value_scales, codes + k * size, [&](int c) { return value(i + k, c); });
    for (int c = 0; c < size; c += 16) {
      const auto of = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k * size + c)); };
      const __m128i low01 = _mm_unpacklo_epi8(of(0), of(1)), high01 = _mm_unpackhi_epi8(of(0), of(1));
      const __m128i low23 = _mm_unpacklo_epi8(of(2), of(3)), high23 = _mm_unpackhi_epi8(of(2), of(3));
      auto* to = reinterpret_cast<__m128i*>(out.values + (i / 4 * size + c) * 4);
      _mm_storeu_si128(to, _mm_unpacklo_epi16(low01, low23));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(low01, low23));
      _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(high01, high23));
      _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(high01, high23));
    }
  }
}

inline void code_span(const Pages& pages, int first, int begin, int end, int width, bool less_first,
                      const CodeScratch& out) {
  with_element(pages.heads.cache_dtype, [&](auto of) {
    with_head_dim(pages.heads.head_dim, [&](auto size) {
      code_span_of<decltype(of), decltype(size)::value>(pages, first, begin, end, width, less_first, out);
    });
  });
}

// Calls take(first, integral_constant<count>) for blocks of kRows rows while that many remain.
template <int kRows, class Take>
inline void in_blocks_of(int& row, int rows, const Take& take) {
  for (; rows - row >= kRows; row += kRows) take(row, std::integral_constant<int, kRows>{});
}
template <class Take>
inline void in_code_blocks(int rows, const Take& take) {
  int row = 0;
  in_blocks_of<kCodeRows>(row, rows, take);
  in_blocks_of<6>(row, rows, take);
  in_blocks_of<3>(row, rows, take);
  in_blocks_of<1>(row, rows, take);
}

// Scores 16 kWide keys for kRows rows, plus a constant per row.
template <int kRows, int kWide>
inline void score_codes(const CodeScratch& scratch, int row, int size, int key, const float* constants, float* scores) {
  Ints sums[kRows][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sums[r][v] = broadcast_shifted<0>(scratch.query_sums + row + r);
  const int8_t* queries = scratch.query_codes + row * size;
  const uint8_t* keys = scratch.keys + key * 4;
  for (int quad = 0; quad < size / 4; ++quad) {
    Bytes k[kWide];
    for (int v = 0; v < kWide; ++v) k[v] = load_bytes(keys + quad * kSpan * 4 + 64 * v);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) sums[r][v] = dot4<true>(sums[r][v], k[v], queries + r * size + 4 * quad);
  }
  Floats scale[kWide];
  for (int v = 0; v < kWide; ++v) scale[v] = load_floats(scratch.key_scales + key + 16 * v);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Floats factor = broadcast(scratch.query_scales[row + r]), constant = broadcast(constants[r]);
    for (int v = 0; v < kWide; ++v)
      store_floats(scores + r * kSpan + 16 * v, fma(mul(to_floats(sums[r][v]), scale[v]), factor, constant));
  }
}

// Combines the lanes of each of kRows vectors, all in the same order. Lane r of the result belongs to vector r; lanes
// beyond kRows are undefined. 16 vectors together take 45 instructions, one by one 128, each of which waits for the one
// before.
template <int kRows, class Combine>
inline Floats across_lanes(const Floats (&rows)[kRows], const Combine& combine) {
  static_assert(kRows <= 16);
  constexpr int kPairs = (kRows + 1) / 2, kQuads = (kPairs + 1) / 2;
  const auto doubles = [](Floats a) { return _mm512_castps_pd(a); };
  const auto floats = [](__m512d a) { return _mm512_castpd_ps(a); };
  Floats pairs[kPairs], quads[4];
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) {  // in each 128-bit lane: a, b, a, b
    const Floats a = rows[2 * i], b = rows[std::min(2 * i + 1, kRows - 1)];
    pairs[i] = combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // in each 128-bit lane: a, b, c, d
    if (i >= kQuads) {
      quads[i] = quads[kQuads - 1];
      continue;
    }
    const auto ab = doubles(pairs[2 * i]), cd = doubles(pairs[std::min(2 * i + 1, kPairs - 1)]);
    quads[i] = combine(floats(_mm512_unpacklo_pd(ab, cd)), floats(_mm512_unpackhi_pd(ab, cd)));
  }
  const auto halves = [&](Floats a, Floats b) {
    return combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const Floats low = halves(quads[0], quads[1]), high = halves(quads[2], quads[3]);
  return combine(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
template <int kRows>
inline Floats sums_of(const Floats (&rows)[kRows]) {
  return across_lanes(rows, [](Floats a, Floats b) { return add(a, b); });
}
template <int kRows>
inline Floats maxima_of(const Floats (&rows)[kRows]) {
  return across_lanes(rows, [](Floats a, Floats b) { return maximum(a, b); });
}
// The largest of numbers that are not negative; NaN and Inf are above every number.
template <int kRows>
inline Floats largest_of(const Floats (&rows)[kRows]) {
  return across_lanes(rows, [](Floats a, Floats b) { return as_floats(max_magnitude(_mm512_castps_si512(a), b)); });
}

// What a span contributes to the rows of a block, one lane each: the maximum score, the sum of weights in units of
// 2^maximum, and the largest value scale.
struct SpanWeights {
  Floats maximum, sum, value_scale;
};

// What the values' scales are multiplied by, so that products with weights, which are at most 1, fit bytes. An Inf or
// NaN among a row's values makes the row NaN, by its largest scale, and the codes zero.
inline float unit_of_codes(float largest) { return largest > 1e-30f && largest < 1e30f ? 255.0f / largest : 0.0f; }

// Masks a row's scores of a span's first `width` keys outside [begin, end), in place. Lanes of the results are of every
// 16th key.
inline void mask_scores(float* scores, int width, int begin, int end, float softcap, const float* value_scales,
                        Floats& most, Floats& largest) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  Ints largest_value = zero_ints();
  most = broadcast(kMaskedScore);
  for (int i = 0; i < width; i += 16) {
    Floats s = load_floats(scores + i);
    if (softcap > 0.0f) s = mul(broadcast(kLog2E), soft_cap(s, softcap));
    const __mmask16 seen = _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(begin - i), _MM_CMPINT_NLT) &
                           _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(end - i), _MM_CMPINT_LT);
    s = _mm512_mask_mov_ps(broadcast(2.0f * kMaskedScore), seen, s);
    store_floats(scores + i, s);
    most = maximum(most, s);
    largest_value = max_magnitude(largest_value, _mm512_maskz_loadu_ps(seen, value_scales + i));
  }
  largest = as_floats(largest_value);
}

// Quantizes a row's weights, 2^(score - highest) times scale(i), the values' scales in units of codes. Returns sums of
// the weights, lanes as above. The scale of a key that the row does not see may be NaN: its code is 0.
template <bool kWhole, class Scale>
inline Floats code_row(const float* scores, int width, Floats highest, const Scale& scale, uint8_t* weights) {
  Floats total = zero_floats();
  const auto code = [&](int i) {
    const Floats weight = rough_exponential2(sub(load_floats(scores + i), highest));
    total = add(total, weight);
    return to_nearest(mul(weight, scale(i)));
  };
  if constexpr (kWhole) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int i = 0; i < kSpan; i += 64) {
      const Ints a = code(i), b = code(i + 16), c = code(i + 32), d = code(i + 48);
      const __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
      _mm512_storeu_si512(weights + i, _mm512_permutexvar_epi32(order, bytes));
    }
  } else {
    for (int i = 0; i < width; i += 16) store_uint8(weights + i, code(i));
  }
  return total;
}

// Which keys the rows of a block see of a span, relative to its first key. Positions, and so the bounds, ascend.
struct SeenKeys {
  int begin[kCodeRows], end[kCodeRows];
};

// Quantizes the weights of kRows rows from their scores of a span's first `width` keys. kWhole: they see every key from
// `begin` on, which is below 16, there is no softcap, and scale_codes has been called. Each step is done for all rows
// before the next, because the steps of one row wait for each other: attention of 128 tokens to 1,000 keys takes 0.90
// of the time with heads of 64, 0.95 with 128 (one thread of a Zen 4, fastest of 300 in turns).
template <int kRows, bool kWhole>
inline SpanWeights code_weights(const CodeScratch& scratch, int width, const SeenKeys& seen, int begin, float softcap,
                                float largest) {
  Floats most[kRows], largest_values[kRows], totals[kRows];
  for (int r = 0; r < kRows; ++r) {
    float* scores = scratch.scores + r * kSpan;
    if constexpr (kWhole) {
      if (begin > 0) {
        const auto present = static_cast<__mmask16>(0xffffu << begin);
        store_floats(scores, _mm512_mask_mov_ps(broadcast(2.0f * kMaskedScore), present, load_floats(scores)));
      }
      most[r] = load_floats(scores);
#pragma GCC unroll 8
      for (int i = 16; i < kSpan; i += 16) most[r] = maximum(most[r], load_floats(scores + i));
    } else {
      mask_scores(scores, width, seen.begin[r], seen.end[r], softcap, scratch.value_scales, most[r], largest_values[r]);
    }
  }
  alignas(64) float highest[16], largest_of_row[16];
  store_floats(highest, maxima_of(most));
  if constexpr (!kWhole) store_floats(largest_of_row, largest_of(largest_values));
  for (int r = 0; r < kRows; ++r) {
    const float* scores = scratch.scores + r * kSpan;
    uint8_t* weights = scratch.weights + r * kSpan;
    if constexpr (kWhole) {
      const auto scale = [&](int i) { return load_floats(scratch.code_scales + i); };
      totals[r] = code_row<true>(scores, kSpan, broadcast(highest[r]), scale, weights);
    } else {
      const Floats unit = broadcast(unit_of_codes(largest_of_row[r]));
      const auto scale = [&](int i) { return mul(unit, load_floats(scratch.value_scales + i)); };
      totals[r] = code_row<false>(scores, width, broadcast(highest[r]), scale, weights);
    }
  }
  return {load_floats(highest), sums_of(totals), kWhole ? broadcast(largest) : load_floats(largest_of_row)};
}

// Returns the largest of a span's value scales, and writes scratch.code_scales.
inline float scale_codes(const CodeScratch& scratch) {
  Ints lanes = zero_ints();
  for (int i = 0; i < kSpan; i += 16) lanes = max_magnitude(lanes, load_floats(scratch.value_scales + i));
  const float largest = from_bits(static_cast<uint32_t>(max_of(lanes)));
  const Floats unit = broadcast(unit_of_codes(largest));
  for (int i = 0; i < kSpan; i += 16)
    store_floats(scratch.code_scales + i, mul(unit, load_floats(scratch.value_scales + i)));
  return largest;
}

// Merges a span's weights into the state of kRows rows. Returns the factors by which the rows' values are rescaled
// (`held`) and the span's sums of codes are added (`added`).
template <int kRows>
inline void add_weights(const SpanWeights& span, float* maxima, float* sums, float* held, float* added) {
  static_assert(kRows <= 16);
  constexpr auto kMask = static_cast<__mmask16>((1u << kRows) - 1);
  const Floats before = _mm512_maskz_loadu_ps(kMask, maxima), highest = maximum(span.maximum, before);
  const Floats old_factor = exponential2(sub(before, highest));
  const Floats new_factor = exponential2(sub(span.maximum, highest));
  const Floats sum = fma(span.sum, new_factor, mul(_mm512_maskz_loadu_ps(kMask, sums), old_factor));
  _mm512_mask_storeu_ps(maxima, kMask, highest);
  _mm512_mask_storeu_ps(sums, kMask, sum);
  _mm512_mask_storeu_ps(held, kMask, old_factor);
  _mm512_mask_storeu_ps(added, kMask, mul(new_factor, mul(span.value_scale, broadcast(1.0f / 255.0f))));
}

// Adds the weighted values of a span's first `width` keys to 16 kWide elements of kRows rows.
template <int kRows, int kWide>
inline void weigh_codes(const CodeScratch& scratch, int size, int first_element, int width,
                        float* values) {
  Ints sums[kRows][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sums[r][v] = zero_ints();
  const int8_t* codes = scratch.values + first_element * 4;
  for (int quad = 0; quad < width / 4; ++quad) {
    __m512i right[kWide];
    for (int v = 0; v < kWide; ++v) right[v] = _mm512_loadu_si512(codes + quad * size * 4 + 64 * v);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      int32_t four;
      __builtin_memcpy(&four, scratch.weights + r * kSpan + 4 * quad, 4);
      const __m512i left = _mm512_set1_epi32(four);
      for (int v = 0; v < kWide; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Floats held = broadcast(scratch.factors[r]);
    const Floats added = broadcast(scratch.factors[kCodeRows + r]);
    for (int v = 0; v < kWide; ++v) {
      float* to = values + r * size + 16 * v;
      store_floats(to, fma(to_floats(sums[r][v]), added, mul(held, load_floats(to))));
    }
  }
}

// Initializes the rows' state from the sequence's first key, in float32. In most models this key gets far more weight
// than others (attention sinks: Xiao et al., 2024, arXiv 2309.17453); in 8 bits, so large a weight would leave no
// precision for its neighbours.
inline void begin_with_first_key(int rows, const Pages& pages, const CodeScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim;
  const float* offset = pages.key_offset(0);
  int64_t vector;
  pages.vectors_of(0, 1, &vector);
  for (int r = 0; r < rows; ++r) {
    const float* query = scratch.queries + r * size;
    Floats sum = zero_floats();
    for (int c = 0; c < size; c += 16) {
      Floats key = pages.load(pages.cache.key, pages.cache.key_scale, vector, c);
      if (offset != nullptr) key = add(key, load_floats(offset + c));
      sum = fma(load_floats(query + c), key, sum);
      store_floats(out.values + r * size + c, pages.load(pages.cache.value, pages.cache.value_scale, vector, c));
    }
    Floats score = broadcast(sum_of(sum));
    if (heads.softcap > 0.0f) score = mul(broadcast(kLog2E), soft_cap(score, heads.softcap));
    out.maximum[r] = max_of(score);
    out.sum[r] = 1.0f;
  }
}

// Attends over the spans that start at keys first_key ... end_key - 1; writes `out`. The tile's queries are quantized
// already.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const CodeScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim, rows = tile.rows();
  const bool from_first = first_key == 0 && heads.window <= 0;
  if (from_first) {
    begin_with_first_key(rows, pages, scratch, out);
  } else {
    out.clear(rows, size);
  }
  // Keys stored minus an offset have nothing left in common; with a window, the first key that a tile sees depends on
  // the tile.
  const bool less_first = heads.window <= 0 && pages.cache.key_offsets == nullptr;
  const auto oldest_of = [&](int position) {
    return heads.window > 0 ? tile.oldest_of(position, heads.window) : static_cast<int>(from_first);
  };
  for (int key = first_key; key < std::min(end_key, tile.end()); key += kSpan) {
    const int begin = std::max(key, oldest_of(tile.first_position));
    const int end = std::min(key + kSpan, tile.end());
    code_span(pages, key, begin, end, tile.seen_width(key, tile.last_position(), kCodeKeys), less_first, scratch);
    const float largest = end - key == kSpan ? scale_codes(scratch) : 0.0f;
    const float* common = less_first ? scratch.common_key : pages.key_offset(key);
    in_code_blocks(rows, [&](int row, auto count) {
      constexpr int kRows = decltype(count)::value;
      const int width = tile.seen_width(key, tile.position_of(row + kRows - 1), kCodeKeys);
      if (width <= 0) return;
      alignas(64) float constants[16] = {};
      if (common != nullptr) {
        Floats products[kRows];
        for (int r = 0; r < kRows; ++r) {
          const float* query = scratch.queries + (row + r) * size;
          products[r] = mul(load_floats(query), load_floats(common));
          for (int c = 16; c < size; c += 16)
            products[r] = fma(load_floats(query + c), load_floats(common + c), products[r]);
        }
        store_floats(constants, sums_of(products));
      }
      for (int c = 0; c < width; c += 32)
        score_codes<kRows, 2>(scratch, row, size, c, constants, scratch.scores + c);
      SeenKeys seen;
      for (int r = 0; r < kRows; ++r) {
        const int position = tile.position_of(row + r);
        seen.begin[r] = oldest_of(position) - key;
        seen.end[r] = tile.end_of(position) - key;
      }
      const bool whole = begin - key < 16 && seen.begin[kRows - 1] <= begin - key && seen.end[0] >= kSpan;
      const auto code = whole && heads.softcap <= 0.0f ? code_weights<kRows, true> : code_weights<kRows, false>;
      const SpanWeights span = code(scratch, width, seen, begin - key, heads.softcap, largest);
      add_weights<kRows>(span, out.maximum + row, out.sum + row, scratch.factors, scratch.factors + kCodeRows);
      float* values = out.values + row * size;
      int c = 0;
      for (; c + 32 <= size; c += 32) weigh_codes<kRows, 2>(scratch, size, c, width, values + c);
      if (c < size) weigh_codes<kRows, 1>(scratch, size, c, width, values + c);
    });
  }
}

#endif

}  // namespace
}  // namespace paged
