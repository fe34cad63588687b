// Codes of int8 for attention (attention_int8.h): of queries, of a span's keys and values, and of a row's weights.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "functions.h"
#include "hadamard.h"
#include "matrix_unit.h"

namespace paged {
namespace {

constexpr int kLargestCodedHead = 256;  // whose elements are held in registers, or nearly

#if defined(__AVX512VNNI__)

// Rows whose scores are held at a time, and the quads of elements and the keys that are multiplied together: codes are
// filled up with zeros to as many.
constexpr int kCodeRows = kHasMatrixUnit ? kAmxRows : kDenseTile;
constexpr int kCodeQuads = kHasMatrixUnit ? kAmxCols / 4 : 4;
constexpr int kCodeKeys = kHasMatrixUnit ? kAmxCols : 32;
constexpr int code_quads(int size) { return (size / 4 + kCodeQuads - 1) / kCodeQuads * kCodeQuads; }

// One thread's memory for a tile.
struct CodeScratch {
  float* queries;        // [rows, head_dim], scaled
  float* query_scales;   // [rows]
  int32_t* query_sums;   // [rows]: -128 times the sum of a row's codes, where keys are coded plus 128
  float* scores;         // [kCodeRows, 128]
  float* key_scales;     // [128]
  float* value_scales;   // [128]
  float* common_key;     // [head_dim]: what keys are coded less
  float* factors;        // [2, kCodeRows]: of what a row holds, and of what a span adds
  int8_t* query_codes;   // [rows, head_dim]
  uint8_t* keys;         // [head_dim / 4, 128, 4]: codes, plus 128 but for the matrix unit
  int8_t* values;        // [128 / 4, head_dim, 4]
  uint8_t* weights;      // [kCodeRows, 128]
  int8_t* rows_of_codes;  // [16, head_dim]

  static size_t floats(int rows, int head_dim) {
    const CodeScratch end = at(nullptr, rows, head_dim);
    return (reinterpret_cast<uintptr_t>(end.rows_of_codes) + line(16 * head_dim)) / sizeof(float);
  }
  static CodeScratch at(float* memory, int rows, int head_dim) {
    auto next = reinterpret_cast<uintptr_t>(memory);
    const auto take = [&](size_t bytes) {
      const uintptr_t here = next;
      next += line(bytes);
      return here;
    };
    const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(sizeof(float) * count)); };
    const size_t elements = static_cast<size_t>(rows) * head_dim;
    CodeScratch s;
    s.queries = floats(elements);
    s.query_scales = floats(rows);
    s.query_sums = reinterpret_cast<int32_t*>(floats(rows));
    s.scores = floats(kCodeRows * kSpan);
    s.key_scales = floats(kSpan);
    s.value_scales = floats(kSpan);
    s.common_key = floats(head_dim);
    s.factors = floats(2 * kCodeRows);
    s.query_codes = reinterpret_cast<int8_t*>(take(elements + kCodeRows * head_dim + 4 * kCodeQuads));
    s.keys = reinterpret_cast<uint8_t*>(take(4 * kSpan * code_quads(head_dim)));
    s.values = reinterpret_cast<int8_t*>(take(kSpan * head_dim));
    s.weights = reinterpret_cast<uint8_t*>(take(kCodeRows * kSpan));
    s.rows_of_codes = reinterpret_cast<int8_t*>(take(16 * head_dim));
    return s;
  }

 private:
  static size_t line(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }
};

// take(integral_constant<size>) for a head of usual size, whose elements fit registers; 0 for others.
template <class Take>
inline void with_head_dim(int size, const Take& take) {
  if (size == 64) return take(std::integral_constant<int, 64>{});
  if (size == 128) return take(std::integral_constant<int, 128>{});
  take(std::integral_constant<int, 0>{});
}

// Codes of a vector, of which load(c) gives 16 elements, and their sum; returns its scale. kSize is its size or 0.
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

// Sixteen elements times Sylvester's matrix, which makes a vector four times as long.
inline Floats hadamard_16(Floats a) { return butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(a)))); }

// Codes the tile's queries, which are in scratch.queries. Their scales take back the length that the transform gave
// them and the keys.
inline void code_queries(int rows, int size, const CodeScratch& scratch) {
  for (int r = 0; r < rows; ++r) {
    const float* query = scratch.queries + r * size;
    int32_t sum;
    const float scale = code_vector<0>(
        size, [&](int c) { return hadamard_16(load_floats(query + c)); }, scratch.query_codes + r * size, &sum);
    scratch.query_scales[r] = scale / 16.0f;
    scratch.query_sums[r] = -128 * sum;
  }
}

// Codes keys begin ... end - 1 of the span at `first`, and their values; what is outside has codes and scales of zero,
// and is never read. Only the first `width` keys of the span, a multiple of 32, are coded; without `less_first` as they
// are.
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
  // The codes and the scale of one vector, of which load(c) gives 16 elements, if it is there.
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
      code(i + k, out.key_scales, codes + k * size,
           [&](int c) { return hadamard_16(sub(key(i + k, c), load_floats(out.common_key + c))); });
    for (int c = 0; c < size; c += 64) {
      Floats rows[16];  // of four codes each
      const int count = std::min(size - c, 64) / 4;
      for (int k = 0; k < 16; ++k) {
        const Ints four = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), codes + k * size + c);
        const Ints offset = kHasMatrixUnit ? zero_ints() : _mm512_set1_epi8(static_cast<char>(0x80));
        rows[k] = as_floats(_mm512_xor_si512(four, offset));
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

// Of one span and a row: its largest score and largest value's scale, and the sum of its weights, in units of the
// largest.
struct SpanWeights {
  float maximum, sum, value_scale;
};

// The bits of the largest of some values' scales: an Inf or NaN among them is the largest.
inline uint32_t largest_scale(const float* scales, int width) {
  Ints largest = zero_ints();
  for (int i = 0; i < width; i += 16) largest = max_magnitude(largest, load_floats(scales + i));
  return static_cast<uint32_t>(max_of(largest));
}

// Codes of one row's weights from its scores of the first `width` keys of a span, of which it sees [begin, end); a
// vector of scores is score_of(i). kWhole: it sees all 128, and no cap bends the scores; `largest` is of all values.
template <bool kWhole, class ScoreOf>
inline SpanWeights code_weights(const ScoreOf& score_of, int width, int begin, int end, float softcap,
                                const float* value_scales, uint32_t largest_bits, uint8_t* weights) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 seen[kSpan / 16];
  Floats s[kSpan / 16], most = broadcast(kMaskedScore);
  Ints largest_value = zero_ints();
#pragma GCC unroll 8
  for (int i = 0; i < kSpan / 16; ++i) {
    if (!kWhole && 16 * i >= width) break;
    s[i] = score_of(i);
    if (!kWhole) {
      if (softcap > 0.0f) s[i] = mul(broadcast(kLog2E), soft_cap(s[i], softcap));
      seen[i] = _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(begin - 16 * i), _MM_CMPINT_NLT) &
                _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(end - 16 * i), _MM_CMPINT_LT);
      s[i] = _mm512_mask_mov_ps(broadcast(2.0f * kMaskedScore), seen[i], s[i]);
      largest_value = max_magnitude(largest_value, _mm512_maskz_loadu_ps(seen[i], value_scales + 16 * i));
    }
    most = maximum(most, s[i]);
  }
  // The scale of the largest value that the row sees: an Inf or NaN among values makes the row NaN, and codes of zero.
  const float largest = from_bits(kWhole ? largest_bits : static_cast<uint32_t>(max_of(largest_value)));
  const float here = max_of(most);
  const Floats unit = broadcast(largest > 1e-30f && largest < 1e30f ? 255.0f / largest : 0.0f);
  Floats total = zero_floats();
  Ints codes[kSpan / 16];
#pragma GCC unroll 8
  for (int i = 0; i < kSpan / 16; ++i) {
    codes[i] = zero_ints();
    if (!kWhole && 16 * i >= width) continue;
    const Floats weight = rough_exponential2(sub(s[i], broadcast(here)));
    total = add(total, weight);
    Floats code = mul(mul(weight, unit), load_floats(value_scales + 16 * i));
    if (!kWhole) code = _mm512_maskz_mov_ps(seen[i], code);
    codes[i] = to_nearest(code);
  }
  store_uint8(weights, codes[0], codes[1], codes[2], codes[3]);
  store_uint8(weights + 64, codes[4], codes[5], codes[6], codes[7]);
  return {here, sum_of(total), largest};
}

// Adds a span's weights to what up to 16 rows hold, and tells by what factors their values are multiplied: those they
// hold, and the sums of codes that are added.
inline void add_weights(const SpanWeights* spans, int rows, float* maxima, float* sums, float* held, float* added) {
  const auto mask = static_cast<__mmask16>((1u << rows) - 1);
  alignas(64) float here[16] = {}, span_sums[16] = {}, value_scales[16] = {};
  for (int r = 0; r < rows; ++r) {
    here[r] = spans[r].maximum;
    span_sums[r] = spans[r].sum;
    value_scales[r] = spans[r].value_scale;
  }
  const Floats before = _mm512_maskz_loadu_ps(mask, maxima), highest = maximum(load_floats(here), before);
  const Floats old_factor = exponential2(sub(before, highest));
  const Floats new_factor = exponential2(sub(load_floats(here), highest));
  const Floats sum = fma(load_floats(span_sums), new_factor, mul(_mm512_maskz_loadu_ps(mask, sums), old_factor));
  _mm512_mask_storeu_ps(maxima, mask, highest);
  _mm512_mask_storeu_ps(sums, mask, sum);
  _mm512_mask_storeu_ps(held, mask, old_factor);
  _mm512_mask_storeu_ps(added, mask, mul(new_factor, mul(load_floats(value_scales), broadcast(1.0f / 255.0f))));
}

// A span of coded keys, of which rows of a tile see some.
struct CodedSpan {
  const QueryTile& tile;
  const paged_heads& heads;
  const CodeScratch& scratch;
  int first_key;
  int first_coded;         // of all keys
  const float* common;     // what keys are coded less, or null
  uint32_t largest_value;  // the bits of the largest of all values' scales

  // How many keys rows up to one at this position are multiplied with: their weights of later ones would be zero.
  int width_of(int position) const {
    return (std::min(tile.end_of(position) - first_key, kSpan) + kCodeKeys - 1) / kCodeKeys * kCodeKeys;
  }
  int position_of(int row) const { return tile.first_position + row / tile.group; }
  // Codes of a row's weights of the first `width` keys; a vector of its scores is score_of(i).
  template <class ScoreOf>
  [[gnu::always_inline]] SpanWeights code_row(int row, int width, const ScoreOf& score_of, uint8_t* weights) const {
    const int position = position_of(row), end = tile.end_of(position) - first_key;
    const int begin = (heads.window > 0 ? tile.oldest_of(position, heads.window) : first_coded) - first_key;
    if (begin <= 0 && end >= kSpan && heads.softcap <= 0.0f)
      return code_weights<true>(score_of, width, begin, end, 0.0f, scratch.value_scales, largest_value, weights);
    return code_weights<false>(score_of, width, begin, end, heads.softcap, scratch.value_scales, 0, weights);
  }
};

#endif

}  // namespace
}  // namespace paged
