// Attention of a tile of query rows by products of pairs of 16-bit codes, accumulated in int32: twice the rate of
// float32 products on AVX2.
//
// Each query, key and value has its own scale. Its largest element becomes the largest code for which sums of products
// fit 32 bits: 5,792 for queries and keys with 64 elements, 4,095 with 128. A row's weights in a span, times their
// values' scales, become codes up to 32,767, limited by their sum: a key with nearly all the weight leaves the other
// keys' precision intact. This is closer to float32 than bfloat16 products, so it needs neither a rotation nor a
// separate first key, as 8-bit codes do (attention_int8.h). Mean KL of a prompt's logits from float32, SmolLM2-135M,
// 768 tokens: 0.0016, the same as with exact products.
//
// The codes of a span of 128 keys and their values are made once and shared by all rows of the tile. Spans start at
// fixed positions, a vector's codes depend on that vector alone, and sums of codes are exact, so a row's result depends
// neither on the tile nor on how a prompt is cut into chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "functions.h"

// AVX-512 with VNNI uses 8-bit codes (attention_int8.h) or bfloat16 pairs instead.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define PAGED_HAS_SHORTS
#endif

namespace paged {
namespace {

// Whether this header serves tiles of these heads.
inline bool has_shorts(const paged_heads& heads) {
#if defined(PAGED_HAS_SHORTS)
  return heads.products != PAGED_FLOAT32_PRODUCTS;
#else
  (void)heads;
  return false;
#endif
}

#if defined(PAGED_HAS_SHORTS)

constexpr int kShortRows = 6;         // rows whose accumulators are held in registers: 12 of 16
constexpr int kShortBlock = 24;       // rows whose scores are held together
constexpr int kShortKeys = 16;        // keys are coded and scored 16 at a time
constexpr int kBlockNumbers = 32;     // numbers for a block of rows, one each, padded to whole vectors
constexpr int kCodedRows = 48;        // queries are coded 16 at a time, and multiplied kShortRows at a time
constexpr int kValueLimit = 4095;     // largest code of a value
constexpr float kWeightSum = 523e3f;  // max sum of a row's weight codes in a span; times kValueLimit below 2^31

// A thread's scratch memory for a tile.
struct ShortScratch {
  float* queries;        // [rows, head_dim], scaled
  float* query_scales;   // [rows], padded with zeros to a multiple of kCodedRows
  float* key_scales;     // [128]
  float* value_scales;   // [128]
  float* scores;         // [kShortBlock, 128]
  int16_t* query_codes;  // [rows, head_dim], padded likewise
  int16_t* keys;         // [128 / 16, head_dim / 2, 16, 2]: pairs along the head
  int16_t* values;       // [head_dim / 16, 128 / 2, 16, 2]: pairs along the keys
  int16_t* weights;      // [kShortBlock, 128]
  int16_t* codes;        // [16, head_dim]

  static size_t floats(int rows, int head_dim) {
    Arena arena(nullptr);
    at(arena, rows, head_dim);
    return arena.used() / sizeof(float);
  }
  static ShortScratch at(Arena& arena, int rows, int head_dim) {
    const size_t size = head_dim, coded_rows = (rows + kCodedRows - 1) / kCodedRows * kCodedRows;
    ShortScratch s;
    s.queries = arena.take<float>(rows * size);
    s.query_scales = arena.take<float>(coded_rows);
    s.key_scales = arena.take<float>(kSpan);
    s.value_scales = arena.take<float>(kSpan);
    s.scores = arena.take<float>(kShortBlock * kSpan);
    s.query_codes = arena.take<int16_t>(coded_rows * size);
    s.keys = arena.take<int16_t>(kSpan * size);
    s.values = arena.take<int16_t>(kSpan * size);
    s.weights = arena.take<int16_t>(kShortBlock * kSpan);
    s.codes = arena.take<int16_t>(16 * size + 16);  // reading the last eight pairs of a head reads sixteen
    return s;
  }
};

// The largest code of queries and keys for which a head's sum of products fits 32 bits.
inline int code_limit(int head_dim) {
  return std::min(static_cast<int>(std::sqrt(2147483647.0 / head_dim)), 32767);
}

// Returns the maximum of each of 16 vectors.
inline Floats largest_of(const float (*vectors)[16]) {
  Floats rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = load_floats(vectors[i]);
  transpose(rows);
  Floats largest = rows[0];
  for (int i = 1; i < 16; ++i) largest = maximum(largest, rows[i]);
  return largest;
}

// Quantizes those of 16 vectors for which is_there(k). load(k, c) returns 16 elements of vector k; each vector's
// largest code is `limit`. Absent vectors get codes and scales of zero. A NaN scale propagates NaN and Inf.
template <class IsThere, class Load>
inline void code_sixteen(int size, int limit, const IsThere& is_there, const Load& load, float* scales,
                         int16_t* codes) {
  Floats lanes[16];
  for (int k = 0; k < 16; ++k) {
    Ints largest = zero_ints();
    for (int c = 0; is_there(k) && c < size; c += 16) largest = max_magnitude(largest, load(k, c));
    lanes[k] = as_floats(largest);
  }
  // All 16 at once, since one vector's maximum, division and codes depend on each other.
  transpose(lanes);
  Ints largest = zero_ints();
  for (int i = 0; i < 16; ++i) largest = max_magnitude(largest, lanes[i]);
  alignas(64) float most[16];
  store_floats(most, as_floats(largest));
  for (int k = 0; k < 16; ++k) {
    int16_t* to = codes + k * size;
    if (!(most[k] > 1e-30f)) {
      scales[k] = most[k] == most[k] ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      __builtin_memset(to, 0, sizeof(int16_t) * size);
      continue;
    }
    const bool finite = most[k] < std::numeric_limits<float>::infinity();
    scales[k] = finite ? most[k] / static_cast<float>(limit) : std::numeric_limits<float>::quiet_NaN();
    const Floats factor = broadcast(static_cast<float>(limit) / most[k]);
    for (int c = 0; c < size; c += 16) store_int16(to + c, to_nearest(mul(load(k, c), factor)));
  }
}

// Quantizes the tile's queries in scratch.queries.
inline void code_queries(int rows, int size, const ShortScratch& scratch) {
  for (int row = 0; row < (rows + kCodedRows - 1) / kCodedRows * kCodedRows; row += 16)
    code_sixteen(
        size, code_limit(size), [&](int k) { return row + k < rows; },
        [&](int k, int c) { return load_floats(scratch.queries + (row + k) * size + c); }, scratch.query_scales + row,
        scratch.query_codes + row * size);
}

// Quantizes keys begin ... end - 1 of the span at `first`, and their values. Positions outside get codes and scales of
// zero and are never read. Only the first `width` keys of the span, a multiple of 16, are processed.
template <class Cached>
inline void code_span_of(const Pages& pages, int first, int begin, int end, int width, const ShortScratch& out) {
  const paged_cache& cache = pages.cache;
  const int size = pages.heads.head_dim;
  int64_t vectors[kSpan];
  pages.vectors_of(begin, end, vectors + begin - first);
  for (int i = 0; i < width; i += 16) {
    const auto code = [&](const void* data, const void* cache_scales, int limit, float* scales) {
      code_sixteen(
          size, limit, [&](int k) { return i + k >= begin - first && i + k < end - first; },
          [&](int k, int c) { return load_cached<Cached>(data, cache_scales, vectors[i + k], size, c); }, scales + i,
          out.codes);
    };
    code(cache.key, cache.key_scale, code_limit(size), out.key_scales);
    for (int c = 0; c < size; c += 32) {
      Floats pairs[16];
      for (int k = 0; k < 16; ++k) pairs[k] = load_floats(reinterpret_cast<const float*>(out.codes + k * size + c));
      transpose(pairs);
      const int count = std::min(size - c, 32) / 2;
      for (int p = 0; p < count; ++p)
        store_floats(reinterpret_cast<float*>(out.keys + (i * (size / 2) + (c / 2 + p) * 16) * 2), pairs[p]);
    }
    code(cache.value, cache.value_scale, kValueLimit, out.value_scales);
    for (int c = 0; c < size; c += 16)
      for (int k = 0; k < 16; k += 2)
        store_pairs(out.values + (c * (kSpan / 2) + (i + k) / 2 * 16) * 2, out.codes + k * size + c,
                    out.codes + (k + 1) * size + c);
  }
}

inline void code_span(const Pages& pages, int first, int begin, int end, int width, const ShortScratch& out) {
  with_element(pages.heads.cache_dtype,
               [&](auto of) { code_span_of<decltype(of)>(pages, first, begin, end, width, out); });
}

// Calls take(r, sum) with the products of kShortRows rows of codes, `stride` apart, and 16 columns of pairs.
template <class Take>
[[gnu::always_inline]] inline void multiply_pairs(const int16_t* rows, int stride, const int16_t* columns, int pairs,
                                                  const Take& take) {
  Ints sums[kShortRows];
#pragma GCC unroll 6
  for (int r = 0; r < kShortRows; ++r) sums[r] = zero_ints();
  for (int p = 0; p < pairs; ++p) {
    const Shorts right = load_shorts(columns + p * 32);
#pragma GCC unroll 6
    for (int r = 0; r < kShortRows; ++r) {
      sums[r] = dot_pairs(sums[r], broadcast_pair(rows + r * stride + 2 * p), right);
      keep_in_register(sums[r]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kShortRows; ++r) take(r, sums[r]);
}

// Scores 16 keys for `count` rows, plus a constant per row.
template <int kSize>
inline void score_shorts(const ShortScratch& scratch, int row, int count, int size, int key, const float* constants,
                         float* scores) {
  if (kSize > 0) size = kSize;
  const int16_t* keys = scratch.keys + key * size;
  multiply_pairs(scratch.query_codes + row * size, size, keys, size / 2, [&](int r, Ints sum) {
    if (r >= count) return;
    const Floats scaled = mul(to_floats(sum), load_floats(scratch.key_scales + key));
    store_floats(scores + r * kSpan, fma(scaled, broadcast(scratch.query_scales[row + r]), broadcast(constants[r])));
  });
}

// What a span contributes to each row of a block. Each step is done for all rows before the next, since one row's steps
// (maximum, sums, division) depend on each other.
struct SpanWeights {
  alignas(64) float maximum[kBlockNumbers];  // maximum of the row's scores
  alignas(64) float sum[kBlockNumbers];      // sum of its weights, in units of 2^maximum
  alignas(64) float factor[kBlockNumbers];   // code = weight * its value's scale * factor
};

// Masks scores that a row does not see; lanes are the maxima of every 16th score.
template <bool kWhole>
inline void mask_scores(float* scores, int width, int begin, int end, float softcap, float* lanes) {
  alignas(64) constexpr float kPlaces[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats most = broadcast(kMaskedScore);
  for (int i = 0; i < width; i += 16) {
    Floats s = load_floats(scores + i);
    if constexpr (!kWhole) {
      if (softcap > 0.0f) s = mul(broadcast(kLog2E), soft_cap(s, softcap));
      const Floats places = load_floats(kPlaces), masked = broadcast(2.0f * kMaskedScore);
      s = choose_greater(places, broadcast(static_cast<float>(begin - i) - 0.5f), s, masked);
      s = choose_greater(broadcast(static_cast<float>(end - i) - 0.5f), places, s, masked);
      store_floats(scores + i, s);
    }
    most = maximum(most, s);
  }
  store_floats(lanes, most);
}

// Turns scores into weights times their values' scales.
template <bool kWhole>
inline void weigh_scores(float* scores, int width, float largest, const float* value_scales, float* sum_lanes,
                         float* coded_lanes, float* largest_lanes) {
  constexpr float kLowest = -126.0f;
  Floats sum = zero_floats(), coded_sum = zero_floats(), coded_largest = zero_floats();
  for (int i = 0; i < width; i += 16) {
    const Floats s = sub(load_floats(scores + i), broadcast(largest));
    Floats weight = rough_exponential2(maximum(broadcast(kLowest), s));
    Floats coded = mul(weight, load_floats(value_scales + i));
    if constexpr (!kWhole) {  // an unseen key may have a non-finite value
      weight = zero_unless_above(s, kLowest, weight);
      coded = zero_unless_above(s, kLowest, coded);
    }
    sum = add(sum, weight);
    coded_sum = add(coded_sum, coded);
    coded_largest = maximum(coded_largest, coded);
    store_floats(scores + i, coded);
  }
  store_lanes(sum_lanes, sum);
  store_lanes(coded_lanes, coded_sum);
  store_floats(largest_lanes, coded_largest);
}

// Quantizes the weights of `count` rows from `row` on, from their scores of the first `width` keys of the span at
// `key`.
inline void code_weights(const QueryTile& tile, const paged_heads& heads, int key, int row, int count, int width,
                         const ShortScratch& scratch, SpanWeights& out) {
  alignas(64) float largest_lanes[kBlockNumbers][16], sum_lanes[2][kBlockNumbers][kSumLanes];
  const auto clear_rest = [&](auto& rows) {
    __builtin_memset(rows[count], 0, sizeof(rows[0]) * (kBlockNumbers - count));
  };
  clear_rest(largest_lanes), clear_rest(sum_lanes[0]), clear_rest(sum_lanes[1]);
  const auto begin_of = [&](int r) {
    return tile.oldest_of(tile.position_of(row + r), heads.window) - key;
  };
  const auto end_of = [&](int r) { return tile.end_of(tile.position_of(row + r)) - key; };
  const auto is_whole = [&](int r) { return begin_of(r) <= 0 && end_of(r) >= width && heads.softcap <= 0.0f; };
  for (int r = 0; r < count; ++r) {
    const auto mask = is_whole(r) ? mask_scores<true> : mask_scores<false>;
    mask(scratch.scores + r * kSpan, width, begin_of(r), end_of(r), heads.softcap, largest_lanes[r]);
  }
  for (int r = 0; r < count; r += 16) store_floats(out.maximum + r, largest_of(largest_lanes + r));
  for (int r = 0; r < count; ++r) {
    const auto weigh = is_whole(r) ? weigh_scores<true> : weigh_scores<false>;
    weigh(scratch.scores + r * kSpan, width, out.maximum[r], scratch.value_scales, sum_lanes[0][r], sum_lanes[1][r],
          largest_lanes[r]);
  }
  for (int r = 0; r < count; r += 16) {
    store_floats(out.sum + r, sums_of(sum_lanes[0] + r));
    const Floats sums = sums_of(sum_lanes[1] + r), largest = largest_of(largest_lanes + r), tiny = broadcast(1e-30f);
    const Floats factor = minimum(div(broadcast(kWeightSum), sums), div(broadcast(32767.0f), maximum(tiny, largest)));
    // If all weights times value scales are zero, the span adds nothing. If a sum is not finite, the factor is NaN, and
    // so becomes the row.
    const Floats nan = broadcast(std::numeric_limits<float>::quiet_NaN());
    const Floats finite = choose_greater(broadcast(1e30f), sums, factor, nan);
    store_floats(out.factor + r, choose_greater(tiny, largest, sub(sums, sums), finite));
  }
  for (int r = 0; r < count; ++r)
    for (int i = 0; i < width; i += 16)
      store_int16(scratch.weights + r * kSpan + i,
                  to_nearest(mul(load_floats(scratch.scores + r * kSpan + i), broadcast(out.factor[r]))));
}

// Merges a span's weights into the state of `count` rows. Returns the factors by which the rows' values are rescaled
// (`held`) and the span's sums of codes are added (`added`).
inline void add_weights(const SpanWeights& span, int count, float* maxima, float* sums, float* held, float* added) {
  for (int first = 0; first < count; first += 16) {
    const int rows = std::min(count - first, 16);
    alignas(64) float highest[16], new_sums[16];
    const Floats before = load_first(maxima + first, rows), here = load_floats(span.maximum + first);
    const Floats most = maximum(here, before), factor = load_floats(span.factor + first);
    const Floats old_factor = exponential2(sub(before, most)), new_factor = exponential2(sub(here, most));
    store_floats(highest, most);
    store_floats(new_sums, fma(load_first(sums + first, rows), old_factor,
                               mul(load_floats(span.sum + first), new_factor)));
    store_floats(held + first, old_factor);
    // A factor of zero adds nothing; NaN propagates.
    store_floats(added + first, choose_greater(broadcast(1e-30f), factor, zero_floats(), div(new_factor, factor)));
    std::copy(highest, highest + rows, maxima + first);
    std::copy(new_sums, new_sums + rows, sums + first);
  }
}

// Adds the weighted values of a span's first `width` keys to 16 elements of `count` rows. Not inlined: in a loop, GCC
// 12 spills the accumulators to the stack.
[[gnu::noinline]] inline void weigh_shorts(const int16_t* weights, const int16_t* values, int width, int count,
                                           const float* held, const float* added, float* out, int size) {
  multiply_pairs(weights, kSpan, values, width / 2, [&](int r, Ints sum) {
    if (r >= count) return;
    float* to = out + r * size;
    store_floats(to, fma(to_floats(sum), broadcast(added[r]), mul(broadcast(held[r]), load_floats(to))));
  });
}

// Adds the quantized span at `key` to the state of rows [row, row + count).
inline void attend_block(const QueryTile& tile, const Pages& pages, int key, int row, int count, int width,
                         const ShortScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim;
  const float* offset = pages.key_offset(key);
  float constants[kShortBlock] = {};
  for (int r = 0; offset != nullptr && r < count; ++r) {
    const float* query = scratch.queries + (row + r) * size;
    constants[r] = max_of(offset_score(offset, size, [&](int c) { return load_floats(query + c); }));
  }
  const auto score = size == 64 ? score_shorts<64> : size == 128 ? score_shorts<128> : score_shorts<0>;
  for (int c = 0; c < width; c += 16)
    for (int r = 0; r < count; r += kShortRows)
      score(scratch, row + r, std::min(count - r, kShortRows), size, c, constants + r, scratch.scores + r * kSpan + c);
  SpanWeights span;
  code_weights(tile, heads, key, row, count, width, scratch, span);
  alignas(64) float held[kBlockNumbers], added[kBlockNumbers];
  add_weights(span, count, out.maximum + row, out.sum + row, held, added);
  for (int c = 0; c < size; c += 16)
    for (int r = 0; r < count; r += kShortRows)
      weigh_shorts(scratch.weights + r * kSpan, scratch.values + c * kSpan, width, std::min(count - r, kShortRows),
                   held + r, added + r, out.values + (row + r) * size + c, size);
}

// Attends over the spans that start at keys first_key ... end_key - 1; writes `out`. The tile's queries are quantized
// already.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const ShortScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int rows = tile.rows();
  out.clear(rows, heads.head_dim);
  for (int key = first_key; key < std::min(end_key, tile.end()); key += kSpan) {
    const int begin = std::max(key, tile.oldest_of(tile.first_position, heads.window));
    const int end = std::min(key + kSpan, tile.end());
    code_span(pages, key, begin, end, tile.seen_width(key, tile.last_position(), kShortKeys), scratch);
    for (int row = 0; row < rows; row += kShortBlock) {
      const int count = std::min(rows - row, kShortBlock);
      const int width = tile.seen_width(key, tile.position_of(row + count - 1), kShortKeys);
      if (width > 0) attend_block(tile, pages, key, row, count, width, scratch, out);
    }
  }
}

#endif

}  // namespace
}  // namespace paged
