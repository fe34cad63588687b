// Attention of a few query rows (decodes, drafts) that reads pages in place, in float32, for every cache dtype and ISA
// level. attention_few.h is faster where there are bfloat16 dot products.
//
// With three to six rows per key, copying keys into another layout costs more than the products: such a version read
// pages at 5 GB/s with two threads and AVX2. Here a key's product with each row is a vector of lanes, and the lanes of
// 16 keys are added up together.
#pragma once

#include <algorithm>

#include "attention_runs.h"
#include "workspace.h"

namespace paged {
namespace {

// A thread's scratch memory for the rows of all heads of an item.
struct InPlaceScratch {
  float* query;   // [heads * rows, head_dim], scaled
  float* scores;  // [heads * rows, 64]

  static size_t floats(const paged_heads& heads) {
    Arena arena(nullptr);
    at(arena, heads);
    return arena.used() / sizeof(float);
  }
  static InPlaceScratch at(Arena& arena, const paged_heads& heads) {
    InPlaceScratch out{};
    out.query = arena.take<float>(max_rows(heads) * heads.head_dim);
    out.scores = arena.take<float>(max_rows(heads) * kKeyTile);
    return out;
  }

 private:
  static size_t max_rows(const paged_heads& heads) {
    return static_cast<size_t>(kSplitTokens) * (heads.num_heads / heads.num_kv_heads) * heads_together(heads);
  }
};

// The keys or values of a tile of 64 keys, of one KV head. Keys outside [begin, end), which no row sees, are never
// read.
template <class Cached>
struct TileVectors {
  const void* data;
  const void* scales;
  const int64_t* vectors;  // per key, the vector of the first of the item's heads
  int head, size;
  int begin, end;

  Floats load(int key, int c) const { return Cached::load(data, scales, vectors[key] + head, size, c); }
  // Multiplies the numbers of some rows, one per key, by the key's vector scale.
  void scale(float* numbers, int rows) const {
    if constexpr (Cached::kUnit != 0.0f) {
      alignas(64) float factors[kKeyTile] = {};
      for (int key = begin; key < end; ++key) factors[key] = scale_of<Cached>(scales, vectors[key] + head);
      for (int i = 0; i < rows * kKeyTile; i += 16)
        store_floats(numbers + i, mul(load_floats(numbers + i), load_floats(factors + i % kKeyTile)));
    }
  }
};

// Scores a tile's keys for kRows rows; zero for keys outside [begin, end).
template <class Cached, int kRows>
inline void score_in_place(const TileVectors<Cached>& keys, const float* query, float* scores, PrefetchQueue& shared) {
  PrefetchQueue ahead = shared;  // kept in registers; through memory, each prefetch would wait for the one before
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
        ahead.fetch(bytes_of<Cached>(size));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) store_lanes(lanes[r][i], sums[r]);
    }
    for (int r = 0; r < kRows; ++r) store_floats(scores + r * kKeyTile + first, sums_of(lanes[r]));
  }
  shared = ahead;
}

// Up to this many rows process two vectors of columns at once. Three on AVX2 would take all registers: one accumulator
// was spilled, and a key took 26 cycles instead of 19 (head_dim 64, AMD Zen 3; no difference while another machine's
// work shares the core).
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kRowsOfTwoVectors = 2;
#else
constexpr int kRowsOfTwoVectors = 3;
#endif

// Adds 16 kWide columns of a tile's weighted values, from column c on, to those of kRows rows.
template <class Cached, int kRows, int kWide>
inline void add_columns(const TileVectors<Cached>& values, const float* weights, int c, float* out,
                        PrefetchQueue& shared) {
  PrefetchQueue ahead = shared;
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
    // The same rate for one vector of columns as for two: prefetched too early, lines are evicted before use.
    if (kWide == 2 || c % 32 == 0) ahead.fetch(bytes_of<Cached>(size));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) store_floats(out + r * size + c + 16 * v, sums[r][v]);
  }
  shared = ahead;
}

template <class Cached, int kRows>
inline void add_in_place(const TileVectors<Cached>& values, const float* weights, float* out, PrefetchQueue& ahead) {
  constexpr int kWide = kRows <= kRowsOfTwoVectors ? 2 : 1;
  int c = 0;
  for (; c + 16 * kWide <= values.size; c += 16 * kWide)
    add_columns<Cached, kRows, kWide>(values, weights, c, out, ahead);
  if (c < values.size) add_columns<Cached, kRows, 1>(values, weights, c, out, ahead);
}

// Adds a tile of keys to the item's partial results, and prefetches its values and `next` meanwhile.
template <class Cached>
inline void attend_tile_in_place(const RunItem& item, int first_key, const SpanKeys& seen,
                                 const InPlaceScratch& scratch, float* partials, size_t partial_floats,
                                 const NextTokens& next) {
  const Pages& pages = item.pages;
  const paged_heads& heads = pages.heads;
  const int rows = item.tile.rows(), size = heads.head_dim;
  int64_t vectors[kKeyTile];
  pages.vectors_of(first_key + seen.begin, first_key + seen.end, vectors + seen.begin);
  const uint8_t* tokens[kKeyTile + kMostTokensAhead];
  const uint8_t** last_token = tokens;
  for (int i = seen.begin; i < seen.end; ++i)
    *last_token++ = static_cast<const uint8_t*>(pages.cache.value) + vectors[i] * bytes_of<Cached>(size);
  last_token = std::copy(next.tokens, next.tokens + next.count, last_token);
  PrefetchQueue ahead{tokens, last_token, 0, item.num_heads};

  const auto of_head = [&](const void* data, const void* scales, int head) {
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

// Attends over the keys of an item that any row sees, with the scaled queries in scratch.query. Writes one Partial per
// head, `partial_floats` apart, and prefetches `next_tokens` meanwhile.
inline void attend_in_place(const RunItem& item, const InPlaceScratch& scratch, float* partials, size_t partial_floats,
                            const NextTokens& next_tokens) {
  const paged_heads& heads = item.pages.heads;
  const int rows = item.tile.rows();
  for (int head = 0; head < item.num_heads; ++head)
    Partial::at(partials + head * partial_floats, rows, heads.head_dim).clear(rows, heads.head_dim);
  const int end_key = item.last * kSpan;
  for (int key = item.first * kSpan; key < end_key; key += kKeyTile) {
    const SpanKeys seen(item.tile, heads, key, kKeyTile);
    if (seen.begin >= seen.end) continue;
    NextTokens next;
    if (key + kKeyTile < end_key) next.look_at(item, key + kKeyTile, kKeyTile);
    with_element(heads.cache_dtype, [&](auto of) {
      attend_tile_in_place<decltype(of)>(item, key, seen, scratch, partials, partial_floats,
                                         next.count > 0 ? next : next_tokens);
    });
  }
}

}  // namespace
}  // namespace paged
