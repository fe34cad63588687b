// Attention of a tile of query rows by dot products of int8 codes, summed in int32: twice the rate of bfloat16 pairs.
//
// Each query, key and value has a scale of its own. Keys are coded less one of them, the first coded key of their span,
// which takes away what they have in common, and a row's product with that key is added to its scores (SageAttention,
// Zhang et al., 2024, arXiv 2410.02367, takes the mean; here a key is taken that is there wherever a chunk ends). Then
// queries and keys are rotated by a Hadamard transform of every 16 elements (QuaRot, Ashkboos et al., 2024, arXiv
// 2404.00456), which spreads what is large. A row's weights of a span become bytes: the largest product of a weight and
// its value's scale is at most 255. The sequence's first key is not coded: begin_with_first_key.
//
// Mean KL of a prompt's logits from float32, Qwen2.5-Coder-1.5B, 384 tokens: 0.0100 with keys as they are, 0.0012 less
// a key, 0.0010 rotated as well, and 0.0008 with exact scores. SmolLM2-135M, 768 tokens: 0.0044 with the first key
// among the others, 0.0036 without, and 0.0033 with exact attention.
//
// The codes of a span of 128 keys and their values are made once, and shared by all rows of the tile: the tokens of a
// chunk times the query heads of one KV head. Spans start at fixed positions, codes depend on nothing but a key and the
// first coded one of its span, and a row's sums have one order, so its result depends neither on the tile nor on how a
// prompt was cut into chunks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_codes.h"
#if defined(__AMX_INT8__)
#include "attention_amx.h"
#endif

namespace paged {
namespace {

// Whether tiles of these heads are taken by this header.
inline bool has_codes(const paged_heads& heads) {
#if defined(__AVX512VNNI__)
  return heads.products == PAGED_INT8_PRODUCTS && heads.head_dim <= kLargestCodedHead;
#else
  (void)heads;
  return false;
#endif
}

#if defined(__AVX512VNNI__)
#if !defined(__AMX_INT8__)

// Calls take(first, integral_constant<count>) for blocks of kRows rows, as long as there are so many.
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

// Scores of kRows rows against the keys of a span from `key` on, two vectors of them, with a constant for each row.
template <int kRows>
inline void score_codes(const CodeScratch& scratch, int row, int size, int key, const float* constants, float* scores) {
  constexpr int kWide = 2;
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

// Adds the values of a span's first `width` keys, weighted, to 16 kWide elements of kRows rows.
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

// Attends with all rows of a tile over a span.
inline void attend_coded_span(const CodedSpan& span, const Partial& out) {
  const CodeScratch& scratch = span.scratch;
  const int size = span.heads.head_dim;
  in_code_blocks(span.tile.rows(), [&](int row, auto count) {
    constexpr int kRows = decltype(count)::value;
    const int width = span.width_of(span.position_of(row + kRows - 1));
    if (width <= 0) return;
    float constants[kRows] = {};
    for (int r = 0; span.common != nullptr && r < kRows; ++r) {
      const float* query = scratch.queries + (row + r) * size;
      constants[r] = _mm512_cvtss_f32(offset_score(span.common, size, [&](int c) { return load_floats(query + c); }));
    }
    for (int c = 0; c < width; c += 32) score_codes<kRows>(scratch, row, size, c, constants, scratch.scores + c);
    SpanWeights weights[kRows];
    for (int r = 0; r < kRows; ++r) {
      const float* scores = scratch.scores + r * kSpan;
      const auto score_of = [&](int i) { return load_floats(scores + 16 * i); };
      weights[r] = span.code_row(row + r, width, score_of, scratch.weights + r * kSpan);
    }
    add_weights(weights, kRows, out.maximum + row, out.sum + row, scratch.factors, scratch.factors + kCodeRows);
    float* values = out.values + row * size;
    int c = 0;
    for (; c + 32 <= size; c += 32) weigh_codes<kRows, 2>(scratch, size, c, width, values + c);
    if (c < size) weigh_codes<kRows, 1>(scratch, size, c, width, values + c);
  });
}

#endif

// What a row holds once it has seen the sequence's first key, which gets far more weight than others in most models
// (attention sinks: Xiao et al., 2024, arXiv 2309.17453): as a byte, a weight that large would leave nothing of its
// neighbours' weights.
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

// Attends over the spans that start at keys first_key ... end_key - 1; fills `out`. The tile's queries are coded
// already.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const CodeScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim, rows = tile.rows();
  const bool from_first = first_key == 0 && heads.window <= 0;
  [[maybe_unused]] const MatrixUnit unit;
  if (from_first) {
    begin_with_first_key(rows, pages, scratch, out);
  } else {
    out.clear(rows, size);
  }
  // Elements of zeros, where a head's do not fill a tile of the matrix unit.
  __builtin_memset(scratch.keys + kSpan * size, 0, kSpan * (4 * code_quads(size) - size));
  // Stored less an offset, keys have nothing in common any more; of a window, the first key that a tile sees depends on
  // the tile.
  const bool less_first = heads.window <= 0 && pages.cache.key_offsets == nullptr;
  const int oldest = heads.window > 0 ? tile.oldest_of(tile.first_position, heads.window) : from_first;
  for (int key = first_key; key < std::min(end_key, tile.end()); key += kSpan) {
    CodedSpan span{tile, heads, scratch, key, from_first, less_first ? scratch.common_key : pages.key_offset(key), 0};
    const int width = span.width_of(span.position_of(rows - 1));
    code_span(pages, key, std::max(key, oldest), std::min(key + kSpan, tile.end()), width, less_first, scratch);
    span.largest_value = largest_scale(scratch.value_scales, width);
    attend_coded_span(span, out);
  }
}

#endif

}  // namespace
}  // namespace paged
