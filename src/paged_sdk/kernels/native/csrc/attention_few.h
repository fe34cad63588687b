// Attention of a few query rows (decodes, drafts) by dot products of bfloat16 pairs, reading bfloat16 or f8e4m3 pages
// in place.
//
// With three to six rows per key, copying keys into another layout costs more than the products: a float path that did
// so read pages at 6 GB/s with two threads. Here eight keys are loaded once, transposed in registers far enough that
// few lanes remain to add, and multiplied with every row; values are processed two keys at a time, interleaved in
// registers.
//
// Keys are processed 8 tokens at a time and values 32, over all heads of the item. Software prefetch runs 16 KiB ahead:
// over the keys of a span, its values, then the keys of the next span (attention_runs.h).
#pragma once

#include <optional>
#include <type_traits>

#include "attention_pairs.h"
#include "attention_runs.h"
#include "workspace.h"

namespace paged {
namespace {

// Whether this header serves split sequences of these heads.
inline bool attends_by_pairs(const paged_heads& heads) {
  return has_pairs(heads) && (heads.cache_dtype == PAGED_BFLOAT16 || heads.cache_dtype == PAGED_FLOAT8_E4M3) &&
         (heads.head_dim == 64 || heads.head_dim == 96 || heads.head_dim == 128 || heads.head_dim == 256);
}

#if defined(__AVX512BF16__)

constexpr int kChunk = 32;       // bfloat16 elements in a register
constexpr int kValueTokens = 32;  // tokens whose values are processed before the next head's
constexpr int kKeysAtOnce = 8;
// Loads pairs of bfloat16 elements from a cache in bfloat16 ...
struct StoredBfloat16 {
  static constexpr int kBytes = 2;

  static Pairs load(const void* data, int64_t element) {
    return _mm512_loadu_si512(static_cast<const uint16_t*>(data) + element);
  }
};

// ... or in f8e4m3: sign, exponent and mantissa are moved into place, which gives the value times 2^-120. Subnormal
// codes count as zero in a dot product: they are at most 2^-6, where a vector's largest element is 256 or more.
struct StoredFloat8 {
  static constexpr int kBytes = 1;

  static Pairs load(const void* data, int64_t element) {
    const auto* codes = static_cast<const uint8_t*>(data) + element;
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    return _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)));
  }
};

// The other factor of a product with f8e4m3 is scaled by 2^100 and the product by 2^20: neither leaves the range of
// bfloat16 for vectors whose largest element is between 2^-80 and 2^30.
constexpr float kFactorUnit = 0x1p100f;
constexpr float kProductUnit = 0x1p20f;

// A thread's scratch memory for the rows of all heads of an item.
struct FewScratch {
  float* query_floats;  // [heads * rows, head_dim], scaled
  uint32_t* query;      // [heads * rows, head_dim / 32, 4, 16]: see spread_query
  float* scores;        // [heads * rows, 128]
  uint32_t* weights;    // [heads * rows, 64]

  static size_t floats(const paged_heads& heads) {
    Arena arena(nullptr);
    at(arena, heads);
    return arena.used() / sizeof(float);
  }
  static FewScratch at(Arena& arena, const paged_heads& heads) {
    const size_t rows = max_rows(heads);
    FewScratch out{};
    out.query_floats = arena.take<float>(rows * heads.head_dim);
    out.query = arena.take<uint32_t>(rows * 2 * heads.head_dim);
    out.scores = arena.take<float>(rows * kSpan);
    out.weights = arena.take<uint32_t>(rows * kSpanPairs);
    return out;
  }

 private:
  static size_t max_rows(const paged_heads& heads) {
    return static_cast<size_t>(kSplitTokens) * (heads.num_heads / heads.num_kv_heads) * heads_together(heads);
  }
};

// Lays out a row's pairs for score_keys: register j of a chunk holds pair 4 l + j four times in its 128-bit lane l.
inline void spread_query(const float* row, int size, Floats unit, uint32_t* out) {
  for (int c = 0; c < size; c += kChunk) {
    const __m512i low = _mm512_castsi256_si512(round_to_bfloat16(mul(unit, load_floats(row + c))));
    const __m512i pairs = _mm512_inserti64x4(low, round_to_bfloat16(mul(unit, load_floats(row + c + 16))), 1);
    uint32_t* chunk = out + 2 * c;
    _mm512_storeu_si512(chunk, _mm512_shuffle_epi32(pairs, _MM_PERM_AAAA));
    _mm512_storeu_si512(chunk + 16, _mm512_shuffle_epi32(pairs, _MM_PERM_BBBB));
    _mm512_storeu_si512(chunk + 32, _mm512_shuffle_epi32(pairs, _MM_PERM_CCCC));
    _mm512_storeu_si512(chunk + 48, _mm512_shuffle_epi32(pairs, _MM_PERM_DDDD));
  }
}

// Sums neighbouring 128-bit lanes: a's two, then b's.
inline Floats add_lanes(Floats a, Floats b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Scores eight keys for kRows rows of one of the item's heads. Four keys at a time are transposed within 128-bit lanes,
// which leaves four lanes to add for four keys; a single key would leave 16. Not inlined, like weigh_values, because
// GCC 12 spills accumulators otherwise.
template <class Stored, int kChunks, int kRows>
__attribute__((noinline)) void score_keys(const void* data, const int64_t* vectors, int head, const uint32_t* query,
                                          float* scores, PrefetchQueue& shared) {
  constexpr int kSize = kChunks * kChunk;
  PrefetchQueue ahead = shared;  // kept in registers; through memory, each prefetch would wait for the one before
  Floats sums[kRows][2];
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero_floats();
#pragma GCC unroll 1
  for (int c = 0; c < kChunks; ++c) {
    Pairs k[2][4];
    for (int i = 0; i < 8; ++i) k[i / 4][i % 4] = Stored::load(data, (vectors[i] + head) * kSize + c * kChunk);
    transpose_lanes(k[0]);
    transpose_lanes(k[1]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Pairs q = load_pairs(query + r * 2 * kSize + (c * 4 + j) * 16);
        sums[r][0] = dot_pairs(k[0][j], q, sums[r][0]);
        sums[r][1] = dot_pairs(k[1][j], q, sums[r][1]);
      }
    }
    for (int i = kKeysAtOnce * c / kChunks; i < kKeysAtOnce * (c + 1) / kChunks; ++i)
      ahead.fetch(kSize * Stored::kBytes);
  }
  shared = ahead;
#pragma GCC unroll 3
  for (int r = 0; r < kRows; r += 2) {
    const Floats first = add_lanes(sums[r][0], sums[r][1]);
    const Floats second = r + 1 < kRows ? add_lanes(sums[r + 1][0], sums[r + 1][1]) : first;
    const Floats both = add_lanes(first, second);
    _mm256_storeu_ps(scores + r * kSpan, _mm512_castps512_ps256(both));
    if (r + 1 < kRows) _mm256_storeu_ps(scores + (r + 1) * kSpan, _mm512_extractf32x8_ps(both, 1));
  }
}

// Adds the weighted values of keys [begin, end) to kWide chunks of kRows rows of one of the item's heads. begin and end
// are even, and the weights of keys that a row does not see are zero. Interleaving puts elements 0-3 of every eight
// into the first half of a chunk's accumulators, 4-7 into the second.
template <class Stored, int kChunks, int kWide, int kRows>
__attribute__((noinline)) void weigh_values(const void* data, const int64_t* vectors, int begin, int end,
                                            int64_t first_element, const uint32_t* weights, float* out,
                                            PrefetchQueue& shared) {
  constexpr int kSize = kChunks * kChunk;
  PrefetchQueue ahead = shared;
  Floats low[kRows][kWide], high[kRows][kWide];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kWide; ++c) {
      low[r][c] = load_floats(out + r * kSize + c * kChunk);
      high[r][c] = load_floats(out + r * kSize + c * kChunk + 16);
    }
  }
  for (int i = begin; i < end; i += 2) {
    const int64_t first = vectors[i] * kSize + first_element, second = vectors[i + 1] * kSize + first_element;
    Pairs a[kWide], b[kWide];
    for (int c = 0; c < kWide; ++c) {
      const Pairs one = Stored::load(data, first + c * kChunk), two = Stored::load(data, second + c * kChunk);
      a[c] = _mm512_unpacklo_epi16(one, two);
      b[c] = _mm512_unpackhi_epi16(one, two);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Pairs w = broadcast_pair(weights[r * kSpanPairs + i / 2]);
      for (int c = 0; c < kWide; ++c) {
        low[r][c] = dot_pairs(a[c], w, low[r][c]);
        high[r][c] = dot_pairs(b[c], w, high[r][c]);
      }
    }
    // Prefetch as many bytes as were used.
    if (2 * kWide >= kChunks || i % 4 == 0) ahead.fetch(kSize * Stored::kBytes);
    if (2 * kWide > kChunks) ahead.fetch(kSize * Stored::kBytes);
  }
  shared = ahead;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kWide; ++c) {
      store_floats(out + r * kSize + c * kChunk, low[r][c]);
      store_floats(out + r * kSize + c * kChunk + 16, high[r][c]);
    }
  }
}

// Undoes the interleaving and multiplies by `unit`.
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

// A head's key and value scales in a span of f8e4m3, and its key offset.
struct SpanScales {
  alignas(64) float key[kSpan] = {};  // zero where there is no key, so that the padding has no effect
  alignas(64) float value[kSpan] = {};
  const float* offset;

  SpanScales(const Pages& pages, const int64_t* vectors, int head, int first_key, const SpanKeys& span)
      : offset(pages.key_offset(first_key, head)) {
    for (int i = span.begin; i < span.end; ++i) {
      key[i] = kProductUnit * static_cast<const float*>(pages.cache.key_scale)[vectors[i] + head];
      value[i] = kFactorUnit * static_cast<const float*>(pages.cache.value_scale)[vectors[i] + head];
    }
  }
  // Turns a scaled query's products with the codes into scores.
  void finish_scores(float* scores, int width, const float* query, int size) const {
    const Floats common =
        offset == nullptr ? zero_floats() : offset_score(offset, size, [&](int c) { return load_floats(query + c); });
    for (int i = 0; i < width; i += 16)
      store_floats(scores + i, fma(load_floats(scores + i), load_floats(key + i), common));
  }
};

// Adds one span to the item's partial results, whose value elements stay interleaved, and prefetches `next` meanwhile.
template <class Stored, int kChunks>
inline void attend_few_span(const RunItem& item, int first_key, const SpanKeys& span, const FewScratch& scratch,
                            float* partials, size_t partial_floats, const NextTokens& next) {
  constexpr bool kScaled = std::is_same_v<Stored, StoredFloat8>;
  constexpr int kSize = kChunks * kChunk;
  const Pages& pages = item.pages;
  const paged_heads& heads = pages.heads;
  const int rows = item.tile.rows();
  const auto partial = [&](int head) { return Partial::at(partials + head * partial_floats, rows, kSize); };
  const auto [begin, end] = span;
  // Groups of eight keys and pairs of values are padded with keys that a row sees, with weight zero: never with a page
  // that may belong to another sequence.
  const int first_group = begin & ~(kKeysAtOnce - 1), end_group = (end + kKeysAtOnce - 1) & ~(kKeysAtOnce - 1);
  const int even_begin = begin & ~1, even_end = (end + 1) & ~1, width = (end + 31) & ~31;
  int64_t vectors[kSpan];
  pages.vectors_of(first_key + begin, first_key + end, vectors + begin);
  std::fill(vectors + first_group, vectors + begin, vectors[begin]);
  std::fill(vectors + end, vectors + end_group, vectors[end - 1]);

  const uint8_t* tokens[2 * kSpan + kMostTokensAhead];
  const uint8_t** last_token = tokens;
  for (const void* data : {pages.cache.key, pages.cache.value})
    for (int i = begin; i < end; ++i)
      *last_token++ = static_cast<const uint8_t*>(data) + vectors[i] * (kSize * Stored::kBytes);
  last_token = std::copy(next.tokens, next.tokens + next.count, last_token);
  const int distance = std::min(tokens_ahead(heads, item.num_heads), end - begin);
  PrefetchQueue ahead{tokens + distance, last_token, 0, item.num_heads};

  for (int first = first_group; first < end_group; first += kKeysAtOnce) {
    for (int head = 0; head < item.num_heads; ++head) {
      in_row_blocks(rows, [&](int row, auto count) {
        const int at = head * rows + row;
        score_keys<Stored, kChunks, decltype(count)::value>(pages.cache.key, vectors + first, head,
                                                            scratch.query + at * 2 * kSize,
                                                            scratch.scores + at * kSpan + first, ahead);
      });
    }
  }
  for (int head = 0; head < item.num_heads; ++head) {
    const Partial out = partial(head);
    std::optional<SpanScales> scales;
    if constexpr (kScaled) scales.emplace(pages, vectors, head, first_key, span);
    for (int row = 0; row < rows; ++row) {
      const int position = item.tile.position_of(row), at = head * rows + row;
      float* scores = scratch.scores + at * kSpan;
      // weigh_row masks these scores, but needs them initialized.
      std::fill(scores, scores + begin, 0.0f);
      std::fill(scores + end, scores + width, 0.0f);
      if (scales) scales->finish_scores(scores, width, scratch.query_floats + at * kSize, kSize);
      const int oldest = heads.window > 0 ? position - heads.window + 1 - first_key : 0;
      weigh_row(scores, width, std::max(oldest, begin), std::min(position + 1 - first_key, end), heads,
                out.maximum[row], out.sum[row], out.values + row * kSize, [&](int i, Floats weight) {
                  store_weights(scratch.weights + at * kSpanPairs, i,
                                scales ? mul(weight, load_floats(scales->value + i)) : weight);
                });
    }
  }
  for (int first = even_begin / kValueTokens * kValueTokens; first < even_end; first += kValueTokens) {
    const int last = std::min(first + kValueTokens, even_end);
    for (int head = 0; head < item.num_heads; ++head) {
      in_row_blocks(rows, [&](int row, auto count) {
        const auto weigh = [&](int chunk, auto wide) {
          weigh_values<Stored, kChunks, decltype(wide)::value, decltype(count)::value>(
              pages.cache.value, vectors, std::max(first, even_begin), last,
              static_cast<int64_t>(head) * kSize + chunk * kChunk, scratch.weights + (head * rows + row) * kSpanPairs,
              partial(head).values + row * kSize + chunk * kChunk, ahead);
        };
        for (int chunk = 0; chunk + 2 <= kChunks; chunk += 2) weigh(chunk, std::integral_constant<int, 2>{});
        if constexpr (kChunks % 2 != 0) weigh(kChunks - 1, std::integral_constant<int, 1>{});
      });
    }
  }
}

template <class Stored, int kChunks>
inline void attend_few_of(const RunItem& item, const FewScratch& scratch, float* partials, size_t partial_floats,
                          const NextTokens& next_tokens) {
  constexpr bool kScaled = std::is_same_v<Stored, StoredFloat8>;
  const int rows = item.tile.rows(), size = kChunks * kChunk;
  for (int r = 0; r < item.num_heads * rows; ++r)
    spread_query(scratch.query_floats + r * size, size, broadcast(kScaled ? kFactorUnit : 1.0f),
                 scratch.query + 2 * r * size);
  const auto partial = [&](int head) { return Partial::at(partials + head * partial_floats, rows, size); };
  for (int head = 0; head < item.num_heads; ++head) partial(head).clear(rows, size);
  for (int index = item.first; index < item.last; ++index) {
    const SpanKeys span(item.tile, item.pages.heads, index * kSpan);
    if (span.begin >= span.end) continue;
    NextTokens next;
    if (index + 1 < item.last) next.look_at({item.tile, item.pages, item.num_heads, index + 1, item.last});
    attend_few_span<Stored, kChunks>(item, index * kSpan, span, scratch, partials, partial_floats,
                                     next.count > 0 ? next : next_tokens);
  }
  for (int head = 0; head < item.num_heads; ++head)
    restore_order(partial(head).values, rows * size, kScaled ? kProductUnit : 1.0f);
}

// Attends over the keys of an item that any row sees, with the scaled queries in scratch.query_floats. Writes one
// Partial per head, `partial_floats` apart, and prefetches `next_tokens` meanwhile.
inline void attend_few(const RunItem& item, const FewScratch& scratch, float* partials, size_t partial_floats,
                       const NextTokens& next_tokens) {
  const auto attend = [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    const auto attend_stored = item.pages.heads.cache_dtype == PAGED_FLOAT8_E4M3
                                   ? attend_few_of<StoredFloat8, kChunks>
                                   : attend_few_of<StoredBfloat16, kChunks>;
    attend_stored(item, scratch, partials, partial_floats, next_tokens);
  };
  switch (item.pages.heads.head_dim) {
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
