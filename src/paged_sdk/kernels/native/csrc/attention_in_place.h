// Attention of a few query rows - decodes, drafts - over pages where they lie, in float32, for every dtype of a cache
// and every instruction set. (attention_few.h has what products of bfloat16 pairs gain.)
//
// With three to six rows for each key, copying keys into another order costs more than the products: so pages were
// read at 5 GB/s with two threads and AVX2. Here a key's product with each row is a vector of lanes, of which those of
// 16 keys are added up together.
#pragma once

#include <algorithm>

#include "attention_runs.h"

namespace paged {
namespace {

// One thread's memory for the rows of all heads of an item.
struct InPlaceScratch {
  float* query;   // [heads * rows, head_dim], scaled
  float* scores;  // [heads * rows, 64]

  static size_t floats(const paged_heads& heads) {
    return max_rows(heads) * (heads.head_dim + kKeyTile);
  }
  static InPlaceScratch at(float* memory, const paged_heads& heads) {
    return {memory, memory + max_rows(heads) * heads.head_dim};
  }

 private:
  static size_t max_rows(const paged_heads& heads) {
    return static_cast<size_t>(kSplitTokens) * (heads.num_heads / heads.num_kv_heads) * heads_together(heads);
  }
};

// The keys or values of a tile of 64 keys, of one KV head; those that no row sees are never read.
template <class Cached>
struct TileVectors {
  const void* data;
  const float* scales;
  const int64_t* vectors;  // of the pages' first head, by key
  int head, size;
  int begin, end;

  Floats load(int key, int c) const { return Cached::load(data, (vectors[key] + head) * size + c); }
  // Multiplies a number for each key, of some rows, by the scales of its vector.
  void scale(float* numbers, int rows) const {
    if constexpr (Cached::kUnit != 0.0f) {
      alignas(64) float factors[kKeyTile] = {};
      for (int key = begin; key < end; ++key) factors[key] = Cached::kUnit * scales[vectors[key] + head];
      for (int i = 0; i < rows * kKeyTile; i += 16)
        store_floats(numbers + i, mul(load_floats(numbers + i), load_floats(factors + i % kKeyTile)));
    }
  }
};

// Scores of kRows rows against the keys of a tile; zero where there is none.
template <class Cached, int kRows>
inline void score_in_place(const TileVectors<Cached>& keys, const float* query, float* scores, LinesAhead& shared) {
  LinesAhead ahead = shared;  // in registers: through memory, each fetch would wait for the one before
  alignas(64) float lanes[kRows][16][kSumLanes];
  const int size = keys.size;
  for (int first = 0; first < kKeyTile; first += 16) {
    for (int i = 0; i < 16; ++i) {
      Floats sums[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r] = zero_floats();
      if (first + i >= keys.begin && first + i < keys.end) {
        for (int c = 0; c < size; c += 16) {
          const Floats key = keys.load(first + i, c);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r] = fma(load_floats(query + r * size + c), key, sums[r]);
        }
        ahead.fetch(size * Cached::kBytes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) store_lanes(lanes[r][i], sums[r]);
    }
    for (int r = 0; r < kRows; ++r) store_floats(scores + r * kKeyTile + first, sums_of(lanes[r]));
  }
  shared = ahead;
}

// Up to so many rows take two vectors of columns at once. Three on AVX2 would take all registers: one sum went by way of
// memory, and a key took 26 cycles instead of 19 (head size 64, AMD Zen 3; as long as before where another machine's
// work shares the core).
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kRowsOfTwoVectors = 2;
#else
constexpr int kRowsOfTwoVectors = 3;
#endif

// Adds 16 kWide columns, from column c on, of the values of a tile, weighted, to those of kRows rows.
template <class Cached, int kRows, int kWide>
inline void add_columns(const TileVectors<Cached>& values, const float* weights, int c, float* out,
                        LinesAhead& shared) {
  LinesAhead ahead = shared;
  const int size = values.size;
  Floats sums[kRows][kWide];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) sums[r][v] = load_floats(out + r * size + c + 16 * v);
  }
  for (int key = values.begin; key < values.end; ++key) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) {
      const Floats value = values.load(key, c + 16 * v);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = fma(broadcast(weights[r * kKeyTile + key]), value, sums[r][v]);
    }
    // As often for one vector of columns at a time as for two: fetched too early, lines are gone again.
    if (kWide == 2 || c % 32 == 0) ahead.fetch(size * Cached::kBytes);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) store_floats(out + r * size + c + 16 * v, sums[r][v]);
  }
  shared = ahead;
}

template <class Cached, int kRows>
inline void add_in_place(const TileVectors<Cached>& values, const float* weights, float* out, LinesAhead& ahead) {
  constexpr int kWide = kRows <= kRowsOfTwoVectors ? 2 : 1;
  int c = 0;
  for (; c + 16 * kWide <= values.size; c += 16 * kWide)
    add_columns<Cached, kRows, kWide>(values, weights, c, out, ahead);
  if (c < values.size) add_columns<Cached, kRows, 1>(values, weights, c, out, ahead);
}

// Adds a tile of keys to the item's partial results, and meanwhile fetches its values and `next`.
template <class Cached>
inline void attend_tile_in_place(const RunItem& item, int first_key, const SpanKeys& seen,
                                 const InPlaceScratch& scratch, float* partials, size_t partial_floats,
                                 const Upcoming& next) {
  const Pages& pages = item.pages;
  const paged_heads& heads = pages.heads;
  const int rows = item.tile.rows(), size = heads.head_dim;
  int64_t vectors[kKeyTile];
  pages.vectors_of(first_key + seen.begin, first_key + seen.end, vectors + seen.begin);
  const uint8_t* tokens[kKeyTile + kMostTokensAhead];
  const uint8_t** last_token = tokens;
  for (int i = seen.begin; i < seen.end; ++i)
    *last_token++ = static_cast<const uint8_t*>(pages.cache.value) + vectors[i] * (size * Cached::kBytes);
  last_token = std::copy(next.tokens, next.tokens + next.count, last_token);
  LinesAhead ahead{tokens, last_token, 0, item.num_heads};

  const auto of_head = [&](const void* data, const float* scales, int head) {
    return TileVectors<Cached>{data, scales, vectors, head, size, seen.begin, seen.end};
  };
  for (int head = 0; head < item.num_heads; ++head) {
    const auto keys = of_head(pages.cache.key, pages.cache.key_scale, head);
    const float* offset = pages.key_offset(first_key, head);
    in_row_blocks(rows, [&](int row, auto count) {
      const int at = head * rows + row;
      score_in_place<Cached, decltype(count)::value>(keys, scratch.query + at * size, scratch.scores + at * kKeyTile,
                                                     ahead);
    });
    keys.scale(scratch.scores + head * rows * kKeyTile, rows);
    for (int at = head * rows; offset != nullptr && at < (head + 1) * rows; ++at)
      add_offset_score(offset, scratch.query + at * size, size, scratch.scores + at * kKeyTile);
  }
  for (int head = 0; head < item.num_heads; ++head) {
    const Partial out = Partial::at(partials + head * partial_floats, rows, size);
    const auto values = of_head(pages.cache.value, pages.cache.value_scale, head);
    float* scores = scratch.scores + head * rows * kKeyTile;
    update_softmax(item.tile, first_key, heads, scores, out);
    values.scale(scores, rows);
    in_row_blocks(rows, [&](int row, auto count) {
      add_in_place<Cached, decltype(count)::value>(values, scores + row * kKeyTile, out.values + row * size, ahead);
    });
  }
}

// Attends over the keys of an item, as far as any row sees them; its scaled queries are in scratch.query. Fills a
// Partial of each head, `partial_floats` apart, and meanwhile fetches `upcoming`.
inline void attend_in_place(const RunItem& item, const InPlaceScratch& scratch, float* partials, size_t partial_floats,
                            const Upcoming& upcoming) {
  const paged_heads& heads = item.pages.heads;
  const int rows = item.tile.rows();
  for (int head = 0; head < item.num_heads; ++head)
    Partial::at(partials + head * partial_floats, rows, heads.head_dim).clear(rows, heads.head_dim);
  const int end_key = item.last * kSpan;
  for (int key = item.first * kSpan; key < end_key; key += kKeyTile) {
    const SpanKeys seen(item.tile, heads, key, kKeyTile);
    if (seen.begin >= seen.end) continue;
    Upcoming next;
    if (key + kKeyTile < end_key) next.look_at(item, key + kKeyTile, kKeyTile);
    with_element(heads.cache_dtype, [&](auto of) {
      attend_tile_in_place<decltype(of)>(item, key, seen, scratch, partials, partial_floats,
                                         next.count > 0 ? next : upcoming);
    });
  }
}

}  // namespace
}  // namespace paged
