// Attention of a tile of query rows by AVX-512 dot products of bfloat16 pairs, accumulated in float32: twice the rate
// of float32 products.
//
// A span of 128 keys and their values is packed into pairs once and shared by all rows of the tile: the tokens of a
// chunk times the query heads of one KV head. Spans start at fixed positions and a row's sums have one order, so a
// row's result depends neither on the tile nor on how a prompt is cut into chunks.
#pragma once

#include <algorithm>

#include "attention_pairs.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace paged {
namespace {

constexpr int kRowBlock = 2 * kDenseTile;  // rows whose scores are held together

// A thread's scratch memory for a tile.
struct PairScratch {
  float* scores;      // [kRowBlock, 128]
  uint32_t* query;    // [rows, head_dim / 2], scaled
  uint32_t* keys;     // [head_dim / 2, 128]: pairs along the head
  uint32_t* values;   // [64, head_dim]: pairs along the keys
  uint32_t* weights;  // [kRowBlock, 64]

  static size_t floats(int rows, int head_dim) {
    Arena arena(nullptr);
    at(arena, rows, head_dim);
    return arena.used() / sizeof(float);
  }
  static PairScratch at(Arena& arena, int rows, int head_dim) {
    const size_t pairs = static_cast<size_t>(head_dim) / 2;
    PairScratch out{};
    out.scores = arena.take<float>(kRowBlock * kSpan);
    out.weights = arena.take<uint32_t>(kRowBlock * kSpanPairs);
    out.keys = arena.take<uint32_t>(pairs * kSpan);
    out.values = arena.take<uint32_t>(kSpanPairs * head_dim);
    out.query = arena.take<uint32_t>(rows * pairs);
    return out;
  }
};

// Packs keys begin ... end - 1 of the span at `first`, and their values. Positions outside are zero and never read.
// Only the first `width` keys of the span, a multiple of 32, are packed.
inline void pack_span(const Pages& pages, int first, int begin, int end, int width, const PairScratch& out) {
  const int head_dim = pages.heads.head_dim;
  const __m256i zero = _mm256_setzero_si256();
  int64_t vectors[kSpan];
  pages.vectors_of(begin, end, vectors + begin - first);
  const auto key = [&](int i, int c) {
    if (i < begin - first || i >= end - first || c >= head_dim) return zero;
    return load_sixteen(pages, pages.cache.key, pages.cache.key_scale, vectors[i], c);
  };
  const auto value = [&](int i, int c) {
    if (i < begin - first || i >= end - first) return zero;
    return load_sixteen(pages, pages.cache.value, pages.cache.value_scale, vectors[i], c);
  };
  for (int i = 0; i < width; i += 16) {
    for (int c = 0; c < head_dim; c += 32) {
      Floats rows[16];  // lanes hold pairs
      for (int r = 0; r < 16; ++r)
        rows[r] = _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(key(i + r, c)), key(i + r, c + 16), 1));
      transpose(rows);
      const int count = head_dim - c >= 32 ? 16 : 8;
      for (int r = 0; r < count; ++r) _mm512_storeu_ps(out.keys + (c / 2 + r) * kSpan + i, rows[r]);
    }
  }
  for (int i = 0; i < width; i += 2) {
    for (int c = 0; c < head_dim; c += 16) {
      const __m512i low = _mm512_cvtepu16_epi32(value(i, c)), high = _mm512_cvtepu16_epi32(value(i + 1, c));
      _mm512_storeu_si512(out.values + i / 2 * head_dim + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// Rounds the tile's scaled queries, float32 [rows, size], to bfloat16.
inline void round_queries(int rows, int size, const float* queries, const PairScratch& scratch) {
  for (int i = 0; i < rows * size; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scratch.query + i / 2), round_to_bfloat16(load_floats(queries + i)));
}

// Attends over the spans that start at keys first_key ... end_key - 1; writes `out`. The tile's queries are rounded
// already.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const PairScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim, rows = tile.rows();
  out.clear(rows, size);
  const auto oldest_of = [&](int position) { return tile.oldest_of(position, heads.window); };
  for (int key = first_key; key < std::min(end_key, tile.end()); key += kSpan) {
    const int begin = std::max(key, oldest_of(tile.first_position));
    const int end = std::min(key + kSpan, tile.end());
    const float* offset = pages.key_offset(key);
    pack_span(pages, key, begin, end, tile.seen_width(key, tile.last_position(), kPairKeys), scratch);
    for (int row = 0; row < rows; row += kRowBlock) {
      const int count = std::min(rows - row, kRowBlock);
      const int width = tile.seen_width(key, tile.position_of(row + count - 1), kPairKeys);
      if (width <= 0) continue;
      multiply_dense<PairDot>(count, scratch.query + row * size / 2, size / 2, scratch.keys, kSpan, size / 2,
                              scratch.scores, kSpan, width, false);
      for (int r = 0; r < count; ++r) {
        if (offset != nullptr) {
          const auto* query = reinterpret_cast<const uint16_t*>(scratch.query) + static_cast<int64_t>(row + r) * size;
          const Floats common = offset_score(offset, size, [&](int c) { return load_bfloat16(query + c); });
          for (float* s = scratch.scores + r * kSpan; s < scratch.scores + r * kSpan + width; s += 16)
            store_floats(s, add(load_floats(s), common));
        }
        const int position = tile.position_of(row + r);
        weigh_row(scratch.scores + r * kSpan, width, oldest_of(position) - key, tile.end_of(position) - key, heads,
                  out.maximum[row + r], out.sum[row + r], out.values + (row + r) * size,
                  [&](int i, Floats weight) { store_weights(scratch.weights + r * kSpanPairs, i, weight); });
      }
      multiply_dense<PairDot>(count, scratch.weights, kSpanPairs, scratch.values, size, width / 2,
                              out.values + row * size, size, size, true);
    }
  }
}

}  // namespace
}  // namespace paged

#endif
