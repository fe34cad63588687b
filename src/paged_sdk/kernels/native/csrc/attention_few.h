// Attention of a few query rows - decodes, drafts - by dot products of bfloat16 pairs over pages where they lie, in
// bfloat16 or f8e4m3.
//
// With three to six rows for each key, copying keys into another order costs more than the products: the float path of
// attention.h reads pages at 6 GB/s with two threads. Here a key is loaded once, multiplied with every row, and summed
// across lanes; values are taken two keys at a time, interleaved in registers.
//
// Memory is read in the order in which it lies: a token's vectors of several KV heads side by side. Reading one head
// after the other leaves gaps, which take the bandwidth from 47 to 19 GB/s. So a span is taken in strips of 32 tokens,
// all heads of an item within each, and while one strip is computed, the next one's lines are fetched in order.
#pragma once

#include <optional>
#include <type_traits>

#include "attention_bf16.h"

namespace paged {
namespace {

// Sequences with at most this many query tokens (decodes, drafts) give each span to whichever thread is free.
constexpr int kSplitTokens = 8;
constexpr int kChunk = 32;  // bfloat16 elements in a register
constexpr int kStrip = 32;  // tokens

// Whether split sequences of these heads are taken by this header.
inline bool reads_in_place(const paged_heads& heads) {
  return has_pairs(heads) && (heads.cache_dtype == PAGED_BFLOAT16 || heads.cache_dtype == PAGED_FLOAT8_E4M3) &&
         (heads.head_dim == 64 || heads.head_dim == 96 || heads.head_dim == 128 || heads.head_dim == 256);
}

// Bytes of a token that are read together: few enough that a strip of keys and the next one stay in a cache.
constexpr int kTokenBytes = 1024;

// KV heads of an item that are read together.
inline int heads_together(const paged_heads& heads) {
  const int vector_bytes = heads.head_dim * (heads.cache_dtype == PAGED_FLOAT8_E4M3 ? 1 : 2);
  int count = heads.num_kv_heads;
  while (count > 1 && (heads.num_kv_heads % count != 0 || count * vector_bytes > kTokenBytes)) --count;
  return count;
}

#if defined(__AVX512BF16__)

// How a cache's elements become pairs of bfloat16: as they are ...
struct StoredBfloat16 {
  static constexpr int kBytes = 2;

  static Pairs load(const void* data, int64_t element) {
    return _mm512_loadu_si512(static_cast<const uint16_t*>(data) + element);
  }
};

// ... or times 2^-120, the signs, exponents and mantissas of f8e4m3 moved to the same places. Subnormal codes count as
// zero in a dot product: at most 2^-6, where a vector's largest element is 256 or more.
struct StoredFloat8 {
  static constexpr int kBytes = 1;

  static Pairs load(const void* data, int64_t element) {
    const auto* codes = static_cast<const uint8_t*>(data) + element;
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    return _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)));
  }
};

// The other factor of a product with f8e4m3 is taken times 2^100, the product times 2^20: neither leaves the range of
// bfloat16 for vectors whose largest element is between 2^-80 and 2^30.
constexpr float kFactorUnit = 0x1p100f;
constexpr float kProductUnit = 0x1p20f;

// Rows that are taken at once, as many as registers hold: queries and one sum each for scores, two sums for each chunk
// of values.
template <int kChunks>
constexpr int kScoreRows = kChunks <= 4 ? 4 : 2;
template <int kChunks>
constexpr int kValueRows = kChunks == 2 ? 6 : kChunks == 3 ? 4 : kChunks == 4 ? 3 : 1;

// Calls take(first, integral_constant<count>) for runs of up to kMost rows of nearly one length.
template <int kMost, class Take>
inline void in_row_blocks(int rows, const Take& take) {
  const int blocks = (rows + kMost - 1) / kMost;
  for (int block = 0; block < blocks; ++block) {
    const int first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    if (count == 1) take(first, std::integral_constant<int, 1>{});
    if constexpr (kMost >= 2)
      if (count == 2) take(first, std::integral_constant<int, 2>{});
    if constexpr (kMost >= 3)
      if (count == 3) take(first, std::integral_constant<int, 3>{});
    if constexpr (kMost >= 4)
      if (count == 4) take(first, std::integral_constant<int, 4>{});
    if constexpr (kMost >= 6) {
      if (count == 5) take(first, std::integral_constant<int, 5>{});
      if (count == 6) take(first, std::integral_constant<int, 6>{});
    }
  }
}

// Keys or values that will be read soon: some tokens' vectors of an item's heads, in the order in which they lie.
struct KeysAhead {
  const uint8_t* data = nullptr;
  const int64_t* vectors = nullptr;  // of the tokens' first head
  int token = 0, end = 0;
  int head = 0, num_heads = 0;

  // Asks for one vector.
  template <class Stored, int kChunks>
  void fetch() {
    constexpr int kVectorBytes = kChunks * kChunk * Stored::kBytes;
    if (token >= end) return;
    const uint8_t* vector = data + (vectors[token] + head) * kVectorBytes;
#pragma GCC unroll 8
    for (int i = 0; i < kVectorBytes; i += 64) __builtin_prefetch(vector + i, 0, 2);
    if (++head == num_heads) head = 0, ++token;
  }
};

// One thread's memory for the rows of all heads of an item.
struct FewScratch {
  float* query_floats;  // [heads * rows, head_dim], scaled
  uint32_t* query;      // [heads * rows, head_dim / 2]
  float* scores;        // [heads * rows, 128]
  uint32_t* weights;    // [heads * rows, 64]

  static size_t floats(const paged_heads& heads) {
    return max_rows(heads) * (heads.head_dim + heads.head_dim / 2 + kSpan + kSpanPairs);
  }
  static FewScratch at(float* memory, const paged_heads& heads) {
    const size_t rows = max_rows(heads);
    float* query = memory + rows * heads.head_dim;
    float* scores = query + rows * (heads.head_dim / 2);
    return {memory, reinterpret_cast<uint32_t*>(query), scores, reinterpret_cast<uint32_t*>(scores + rows * kSpan)};
  }

 private:
  static size_t max_rows(const paged_heads& heads) {
    return static_cast<size_t>(kSplitTokens) * (heads.num_heads / heads.num_kv_heads) * heads_together(heads);
  }
};

// The sums of four vectors, in order: adding across lanes one by one takes three times the instructions.
inline __m128 sums_of(const Floats (&v)[4]) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 lanes = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// [16][4] to the first kRows of four rows of 16.
template <int kRows>
inline void store_transposed(const float* fours, float* rows, int stride) {
  const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Floats v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm512_permutexvar_ps(by_row, load_floats(fours + 16 * i));
  const Floats ab_low = _mm512_shuffle_f32x4(v[0], v[1], 0x44), ab_high = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const Floats cd_low = _mm512_shuffle_f32x4(v[2], v[3], 0x44), cd_high = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  store_floats(rows, _mm512_shuffle_f32x4(ab_low, cd_low, 0x88));
  if constexpr (kRows > 1) store_floats(rows + stride, _mm512_shuffle_f32x4(ab_low, cd_low, 0xdd));
  if constexpr (kRows > 2) store_floats(rows + 2 * stride, _mm512_shuffle_f32x4(ab_high, cd_high, 0x88));
  if constexpr (kRows > 3) store_floats(rows + 3 * stride, _mm512_shuffle_f32x4(ab_high, cd_high, 0xdd));
}

// Scores of kRows rows of one of the item's heads against the keys [begin, end) of the strip at `first`. The strip's
// other scores are left undefined.
template <class Stored, int kChunks, int kRows>
inline void score_rows(const Pages& pages, const int64_t* vectors, int head, int first, int begin, int end,
                       const uint32_t* query, float* scores, KeysAhead& shared) {
  KeysAhead ahead = shared;  // in registers: through memory, each fetch would wait for the one before
  Pairs q[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) q[r][c] = load_pairs(query + r * kChunks * kChunk / 2 + c * kChunk / 2);
  alignas(64) float sums[kStrip][4];
  for (int i = begin; i < end; ++i) {
    Floats row_sums[4];
    for (int r = 0; r < 4; ++r) row_sums[r] = zero_floats();
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Pairs key = Stored::load(pages.cache.key, (vectors[i] + head) * (kChunks * kChunk) + c * kChunk);
      for (int r = 0; r < kRows; ++r) row_sums[r] = dot_pairs(key, q[r][c], row_sums[r]);
    }
    ahead.fetch<Stored, kChunks>();
    _mm_store_ps(sums[i - first], sums_of(row_sums));
  }
  shared = ahead;
  for (int i = 0; i < kStrip; i += 16) store_transposed<kRows>(sums[i], scores + first + i, kSpan);
}

// Adds the values of the keys [begin, end), weighted, to kRows rows of one of the item's heads; begin and end are even,
// and the weights of keys that a row does not see are zero. Interleaving takes elements 0-3 of every eight into the
// first half of a chunk's sums, 4-7 into the second.
template <class Stored, int kChunks, int kRows>
inline void weigh_values(const Pages& pages, const int64_t* vectors, int head, int begin, int end,
                         const uint32_t* weights, float* out, KeysAhead& shared) {
  KeysAhead ahead = shared;
  constexpr int kSize = kChunks * kChunk;
  Floats low[kRows][kChunks], high[kRows][kChunks];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      low[r][c] = load_floats(out + r * kSize + c * kChunk);
      high[r][c] = load_floats(out + r * kSize + c * kChunk + 16);
    }
  }
  for (int i = begin; i < end; i += 2) {
    Pairs w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = broadcast_pair(weights[r * kSpanPairs + i / 2]);
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Pairs first = Stored::load(pages.cache.value, (vectors[i] + head) * kSize + c * kChunk);
      const Pairs second = Stored::load(pages.cache.value, (vectors[i + 1] + head) * kSize + c * kChunk);
      const Pairs a = _mm512_unpacklo_epi16(first, second), b = _mm512_unpackhi_epi16(first, second);
      for (int r = 0; r < kRows; ++r) {
        low[r][c] = dot_pairs(a, w[r], low[r][c]);
        high[r][c] = dot_pairs(b, w[r], high[r][c]);
      }
    }
    ahead.fetch<Stored, kChunks>();
    ahead.fetch<Stored, kChunks>();
  }
  shared = ahead;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      store_floats(out + r * kSize + c * kChunk, low[r][c]);
      store_floats(out + r * kSize + c * kChunk + 16, high[r][c]);
    }
  }
}

// Undoes the interleaving, and multiplies.
inline void restore_order(float* values, int count, float unit) {
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < count; i += kChunk) {
    const Floats low = mul(load_floats(values + i), broadcast(unit));
    const Floats high = mul(load_floats(values + i + 16), broadcast(unit));
    store_floats(values + i, _mm512_permutex2var_ps(low, front, high));
    store_floats(values + i + 16, _mm512_permutex2var_ps(low, back, high));
  }
}

// The first strip of the keys [begin, end) of a span, whose vectors are given.
inline KeysAhead keys_ahead(const Pages& pages, const int64_t* vectors, int num_heads, int begin, int end) {
  const int strip_end = std::min((begin / kStrip + 1) * kStrip, end);
  return {static_cast<const uint8_t*>(pages.cache.key), vectors, begin, strip_end, 0, num_heads};
}

// The part of a span that an item's rows see, [begin, end) of it.
struct SpanKeys {
  int begin, end;

  SpanKeys(const QueryTile& tile, const paged_heads& heads, int first_key)
      : begin(heads.window > 0 ? std::max(tile.first_position - heads.window + 1 - first_key, 0) : 0),
        end(std::min(tile.first_position + tile.num_tokens - first_key, kSpan)) {}
};

// The scales of a head's keys and values in a span of f8e4m3, and its key offset.
struct SpanScales {
  alignas(64) float key[kSpan] = {};  // zero where there is no key, so that what lies there counts for nothing
  alignas(64) float value[kSpan] = {};
  const float* offset;

  SpanScales(const Pages& pages, const int64_t* vectors, int head, int first_key, const SpanKeys& span)
      : offset(pages.key_offset(first_key, head)) {
    for (int i = span.begin; i < span.end; ++i) {
      key[i] = kProductUnit * pages.cache.key_scale[vectors[i] + head];
      value[i] = kFactorUnit * pages.cache.value_scale[vectors[i] + head];
    }
  }
  // Scores of a scaled query from its products with the codes.
  void finish_scores(float* scores, int width, const float* query, int size) const {
    const Floats common =
        offset == nullptr ? zero_floats() : offset_score(offset, size, [&](int c) { return load_floats(query + c); });
    for (int i = 0; i < width; i += 16)
      store_floats(scores + i, fma(load_floats(scores + i), load_floats(key + i), common));
  }
};

template <class Stored, int kChunks>
inline void attend_few_of(const QueryTile& tile, const Pages& pages, int num_heads, int first_key,
                          const FewScratch& scratch, float* partials, size_t partial_floats, KeysAhead& upcoming) {
  constexpr bool kScaled = std::is_same_v<Stored, StoredFloat8>;
  const paged_heads& heads = pages.heads;
  const int rows = tile.rows(), size = heads.head_dim;
  const auto partial = [&](int head) { return Partial::at(partials + head * partial_floats, rows, size); };
  for (int head = 0; head < num_heads; ++head) partial(head).clear(rows, size);
  const SpanKeys span(tile, heads, first_key);
  const auto [begin, end] = span;
  if (begin >= end) return;
  // An odd end is paired with weight zero: the same key is read once more, never a page that may be another sequence's.
  const int even_begin = begin & ~1, even_end = (end + 1) & ~1, width = (end + 31) & ~31;
  int64_t vectors[kSpan];
  pages.vectors_of(first_key + begin, first_key + end, vectors + begin);
  vectors[even_begin] = vectors[begin];
  vectors[even_end - 1] = vectors[end - 1];
  const KeysAhead keys = keys_ahead(pages, vectors, num_heads, begin, end);
  const auto strip_after = [&](const void* data, int first, int last) {
    KeysAhead strip = keys;
    strip.data = static_cast<const uint8_t*>(data);
    strip.token = first;
    strip.end = last;
    return strip;
  };
  for (int first = even_begin / kStrip * kStrip; first < end; first += kStrip) {
    const int last = std::min(first + kStrip, end);
    KeysAhead next = last < end ? strip_after(pages.cache.key, last, std::min(last + kStrip, end))
                                : strip_after(pages.cache.value, begin, std::min((begin / kStrip + 1) * kStrip, end));
    for (int head = 0; head < num_heads; ++head) {
      in_row_blocks<kScoreRows<kChunks>>(rows, [&](int row, auto count) {
        const int at = head * rows + row;
        score_rows<Stored, kChunks, decltype(count)::value>(pages, vectors, head, first, std::max(first, begin), last,
                                                            scratch.query + at * size / 2, scratch.scores + at * kSpan,
                                                            next);
      });
    }
  }
  for (int head = 0; head < num_heads; ++head) {
    const Partial out = partial(head);
    std::optional<SpanScales> scales;
    if constexpr (kScaled) scales.emplace(pages, vectors, head, first_key, span);
    for (int row = 0; row < rows; ++row) {
      const int position = tile.first_position + row / tile.group, at = head * rows + row;
      float* scores = scratch.scores + at * kSpan;
      // weigh_row masks what the row does not see, but scores that were never written must be numbers all the same.
      std::fill(scores, scores + begin, 0.0f);
      std::fill(scores + end, scores + width, 0.0f);
      if (scales) scales->finish_scores(scores, width, scratch.query_floats + at * size, size);
      const int oldest = heads.window > 0 ? position - heads.window + 1 - first_key : 0;
      weigh_row(scores, width, std::max(oldest, begin), std::min(position + 1 - first_key, end), heads,
                out.maximum[row], out.sum[row], out.values + row * size, scratch.weights + at * kSpanPairs,
                scales ? scales->value : nullptr);
    }
  }
  for (int first = even_begin / kStrip * kStrip; first < even_end; first += kStrip) {
    const int last = std::min(first + kStrip, even_end);
    KeysAhead next = last < end ? strip_after(pages.cache.value, last, std::min(last + kStrip, end)) : KeysAhead{};
    KeysAhead& ahead = last < end ? next : upcoming;
    for (int head = 0; head < num_heads; ++head) {
      in_row_blocks<kValueRows<kChunks>>(rows, [&](int row, auto count) {
        weigh_values<Stored, kChunks, decltype(count)::value>(pages, vectors, head, std::max(first, even_begin), last,
                                                              scratch.weights + (head * rows + row) * kSpanPairs,
                                                              partial(head).values + row * size, ahead);
      });
    }
  }
  for (int head = 0; head < num_heads; ++head)
    restore_order(partial(head).values, rows * size, kScaled ? kProductUnit : 1.0f);
}

// Attends over the keys of one span, [first_key, first_key + 128), as far as any row sees them, for `num_heads` KV
// heads from pages.kv_head on, whose scaled queries are in scratch.query_floats. Fills a Partial of each head,
// `partial_floats` apart, and meanwhile fetches `upcoming`.
inline void attend_few(const QueryTile& tile, const Pages& pages, int num_heads, int first_key,
                       const FewScratch& scratch, float* partials, size_t partial_floats, KeysAhead& upcoming) {
  const bool scaled = pages.heads.cache_dtype == PAGED_FLOAT8_E4M3;
  const Floats unit = broadcast(scaled ? kFactorUnit : 1.0f);
  for (int i = 0; i < num_heads * tile.rows() * pages.heads.head_dim; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scratch.query + i / 2),
                        round_to_bfloat16(mul(unit, load_floats(scratch.query_floats + i))));
  const auto attend = [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    const auto attend_stored = scaled ? attend_few_of<StoredFloat8, kChunks> : attend_few_of<StoredBfloat16, kChunks>;
    attend_stored(tile, pages, num_heads, first_key, scratch, partials, partial_floats, upcoming);
  };
  switch (pages.heads.head_dim) {
    case 64:
      return attend(std::integral_constant<int, 2>{});
    case 96:
      return attend(std::integral_constant<int, 3>{});
    case 128:
      return attend(std::integral_constant<int, 4>{});
    default:
      return attend(std::integral_constant<int, 8>{});
  }
}

#endif

}  // namespace
}  // namespace paged
