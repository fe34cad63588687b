// Attention of a tile of query rows by AMX: products of bfloat16 pairs, accumulated in float32.
//
// Rows of the tile are lanes here, and scores are stored as [keys][rows]. The maxima and weight sums of 16 rows need no
// step across lanes, which halves the time of softmax compared with one row at a time. Keys are multiplied in the
// cache's own layout, values transposed. Spans start at fixed positions and a row's sums have one order, so a row's
// result depends neither on the tile nor on how a prompt is cut into chunks.
#pragma once

#include <algorithm>

#include "attention_pairs.h"
#include "attention_runs.h"
#include "matrix_unit.h"

#if defined(__AMX_BF16__)

#include "pairs_amx.h"

namespace paged {
namespace {

// Rows per block, whose scores are held together: two vectors.
constexpr int kRowLanes = 2 * kPanelRows;
constexpr int kLanePitch = kRowLanes * sizeof(float);

// A thread's scratch memory for a tile, whose rows are in blocks.
struct PairScratch {
  uint32_t* query;    // [blocks, head_dim / 2, 32], scaled: pairs along the head
  float* sums;        // [blocks, head_dim, 32]: weighted values
  float* maximum;     // [blocks, 32]
  float* total;       // [blocks, 32]: sum of weights
  uint32_t* keys;     // [128, head_dim / 2]: pairs along the head
  uint32_t* values;   // [head_dim, 64]: pairs along the keys
  float* scores;      // [128, 32]
  uint32_t* weights;  // [64, 32]: pairs along the keys

  static size_t blocks(int rows) { return (static_cast<size_t>(rows) + kRowLanes - 1) / kRowLanes; }
  static size_t floats(int rows, int head_dim) {
    Arena arena(nullptr);
    at(arena, rows, head_dim);
    return arena.used() / sizeof(float);
  }
  static PairScratch at(Arena& arena, int rows, int head_dim) {
    const size_t lanes = blocks(rows) * kRowLanes, size = head_dim;
    PairScratch out{};
    out.query = arena.take<uint32_t>(lanes * size / 2);
    out.sums = arena.take<float>(lanes * size);
    out.maximum = arena.take<float>(lanes);
    out.total = arena.take<float>(lanes);
    out.keys = arena.take<uint32_t>(kSpan * size / 2);
    out.values = arena.take<uint32_t>(kSpan * size / 2);
    out.scores = arena.take<float>(kSpan * kRowLanes);
    out.weights = arena.take<uint32_t>(kSpanPairs * kRowLanes);
    return out;
  }
};

// Rounds the tile's scaled queries, float32 [rows, size], to bfloat16. The last block is padded with zeros.
inline void round_queries(int rows, int size, const float* queries, const PairScratch& scratch) {
  const auto load = [&](int row, int c) {
    return row < rows && c < size ? load_floats(queries + static_cast<int64_t>(row) * size + c) : zero_floats();
  };
  const int all = static_cast<int>(PairScratch::blocks(rows)) * kRowLanes;
  for (int row = 0; row < all; row += 16) {
    uint32_t* const to = scratch.query + static_cast<int64_t>(row / kRowLanes * kRowLanes) * size / 2 + row % kRowLanes;
    for (int c = 0; c < size; c += 32) {
      Floats lanes[16];  // lanes hold pairs
      for (int r = 0; r < 16; ++r)
        lanes[r] = _mm512_castsi512_ps(side_by_side(load(row + r, c), load(row + r, c + 16)));
      transpose(lanes);
      for (int p = 0; p < std::min(16, (size - c) / 2); ++p) _mm512_storeu_ps(to + (c / 2 + p) * kRowLanes, lanes[p]);
    }
  }
}

// Packs keys begin ... end - 1 of the span at `first`, and their values. Positions outside are zero and never read.
// Only the first `width` keys of the span, a multiple of 32, are packed.
inline void pack_span(const Pages& pages, int first, int begin, int end, int width, const PairScratch& out) {
  const int size = pages.heads.head_dim;
  int64_t vectors[kSpan];
  pages.vectors_of(begin, end, vectors + begin - first);
  const auto load = [&](const void* data, const void* scales, int i, int c) {
    return i < begin - first || i >= end - first ? _mm256_setzero_si256()
                                                 : load_sixteen(pages, data, scales, vectors[i], c);
  };
  const auto value = [&](int i, int c) {
    return _mm512_cvtepu16_epi32(load(pages.cache.value, pages.cache.value_scale, i, c));
  };
  for (int i = 0; i < width; ++i)
    for (int c = 0; c < size; c += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.keys + (i * size + c) / 2),
                          load(pages.cache.key, pages.cache.key_scale, i, c));
  for (int i = 0; i < width; i += 32) {
    for (int c = 0; c < size; c += 16) {
      Floats columns[16];  // lanes hold pairs
      for (int p = 0; p < 16; ++p)
        columns[p] = _mm512_castsi512_ps(
            _mm512_or_si512(value(i + 2 * p, c), _mm512_slli_epi32(value(i + 2 * p + 1, c), 16)));
      transpose(columns);
      for (int r = 0; r < 16; ++r) _mm512_storeu_ps(out.values + (c + r) * kSpanPairs + i / 2, columns[r]);
    }
  }
}

// Prefetches a span's keys and values, some at a time, while the span before is computed.
class SpanPrefetcher {
 public:
  SpanPrefetcher(const Pages& pages, int begin, int end)
      : pages_(pages), count_(std::max(end - begin, 0)), bytes_(vector_bytes(pages.heads)) {
    if (count_ > 0) pages.vectors_of(begin, end, vectors_);
  }
  // Prefetches the remainder of the first part / parts of the span.
  void fetch(size_t part, size_t parts) {
    for (const size_t last = count_ * part / parts; next_ < last; ++next_) {
      for (const void* data : {pages_.cache.key, pages_.cache.value}) {
        const uint8_t* vector = static_cast<const uint8_t*>(data) + vectors_[next_] * bytes_;
        for (int64_t line = 0; line < bytes_; line += 64) __builtin_prefetch(vector + line, 0, 2);
      }
    }
  }

 private:
  const Pages& pages_;
  size_t count_, next_ = 0;
  int64_t bytes_;  // bytes of a vector
  int64_t vectors_[kSpan];
};

// sums [16 num_tiles, 32] (+)= rows [16 num_tiles, depth] . lanes [depth, 32] in bfloat16 pairs, for the first 16
// kVectors lanes. Tiles are configured for `step` pairs, and `depth` is a multiple of it.
template <int kVectors, bool kAdds>
inline void multiply_tiles(const uint32_t* rows, int64_t stride, const uint32_t* lanes, int depth, int step,
                           int num_tiles, float* sums) {
  const int pairs = num_tiles / 2, row = 2 * pairs * kAmxRows;
  const auto multiply = [&](auto tiles, int first, int count) {
    const uint32_t* columns[kVectors];
    float* to[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = lanes + v * 16, to[v] = sums + first * kRowLanes + v * 16;
    multiply_squares<decltype(tiles)::value, kVectors, kAdds, kLanePitch>(rows + first * stride, stride, columns, depth,
                                                                          step, count, to, [](int) {});
  };
  multiply(std::integral_constant<int, 2>{}, 0, pairs);
  multiply(std::integral_constant<int, 1>{}, row, num_tiles % 2);
}

// The same for any depth.
template <int kVectors, bool kAdds>
[[gnu::noinline]] void multiply_lanes(MatrixUnit& unit, const uint32_t* rows, int64_t stride, const uint32_t* lanes,
                                      int depth, int num_tiles, float* sums) {
  const int whole = depth / kAmxPairs * kAmxPairs;
  compiler_barrier();
  if (whole > 0) {
    unit.shape(kAmxRows, kAmxRows, kAmxPairs);
    multiply_tiles<kVectors, kAdds>(rows, stride, lanes, whole, kAmxPairs, num_tiles, sums);
  }
  if (whole == depth) return;
  unit.shape(kAmxRows, kAmxRows, depth - whole);
  const auto multiply_rest = whole > 0 ? multiply_tiles<kVectors, true> : multiply_tiles<kVectors, kAdds>;
  multiply_rest(rows + whole, stride, lanes + whole * kRowLanes, depth - whole, depth - whole, num_tiles, sums);
}

// Returns the dot products of 16 rows' queries with a span's key offset.
inline Floats offset_scores(const float* offset, int size, const uint32_t* query) {
  Floats sum = zero_floats();
  for (int c = 0; c < size; c += 2) {
    const Pairs pair = load_pairs(query + c / 2 * kRowLanes);
    const Pairs second = _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
    sum = fma(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), broadcast(offset[c]), sum);
    sum = fma(_mm512_castsi512_ps(second), broadcast(offset[c + 1]), sum);
  }
  return sum;
}

// The keys that each of 16 rows sees, relative to the span's first key.
struct SeenKeys {
  alignas(64) int32_t begin[16], end[16];
};

// Adds the key offset's products to 16 rows' scores, applies the softcap, and masks keys that a row does not see.
inline void adjust_scores(float* scores, int width, Floats common, float cap, const SeenKeys& keys) {
  const __m512i begin = _mm512_load_si512(keys.begin), end = _mm512_load_si512(keys.end);
  for (int k = 0; k < width; ++k, scores += kRowLanes) {
    Floats s = add(load_floats(scores), common);
    if (cap > 0.0f) s = mul(broadcast(kLog2E), soft_cap(s, cap));
    const __m512i key = _mm512_set1_epi32(k);
    const __mmask16 seen = _mm512_cmple_epi32_mask(begin, key) & _mm512_cmpgt_epi32_mask(end, key);
    store_floats(scores, _mm512_mask_mov_ps(broadcast(2.0f * kMaskedScore), seen, s));
  }
}

// Computes the weights of 16 rows from their scores of a span's first `width` keys, and rescales the rows' state.
inline void weigh_lanes(const float* scores, int width, float* row_maximum, float* row_total, int size, float* sums,
                        uint32_t* weights) {
  constexpr int kChains = 4;  // an addition has a latency of 4 cycles, a vector's exponentials take 2
  Floats most[kChains], totals[kChains];
  for (int i = 0; i < kChains; ++i) most[i] = load_floats(scores + i * kRowLanes), totals[i] = zero_floats();
  for (int k = kChains; k < width; k += kChains)
    for (int i = 0; i < kChains; ++i) most[i] = maximum(most[i], load_floats(scores + (k + i) * kRowLanes));
  const Floats before = load_floats(row_maximum);
  const Floats highest = maximum(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])), before);
  for (int k = 0; k < width; k += kChains) {
    Floats w[kChains];
    for (int i = 0; i < kChains; ++i) {
      w[i] = rough_exponential2(sub(load_floats(scores + (k + i) * kRowLanes), highest));
      totals[i] = add(totals[i], w[i]);
    }
    for (int i = 0; i < kChains; i += 2)
      _mm512_storeu_si512(weights + (k + i) / 2 * kRowLanes, lane_by_lane(w[i], w[i + 1]));
  }
  Floats total = load_floats(row_total);
  if (_mm512_cmp_ps_mask(highest, before, _CMP_NEQ_UQ) != 0) {
    const Floats factor = exponential2(sub(before, highest));
    total = mul(total, factor);
    for (int c = 0; c < size; ++c) store_floats(sums + c * kRowLanes, mul(load_floats(sums + c * kRowLanes), factor));
    store_floats(row_maximum, highest);
  }
  store_floats(row_total, add(total, add(add(totals[0], totals[1]), add(totals[2], totals[3]))));
}

// Writes the tile's state to `out`, transposed back to one row after the other.
inline void store_rows(int rows, int size, const PairScratch& scratch, const Partial& out) {
  std::copy_n(scratch.maximum, rows, out.maximum);
  std::copy_n(scratch.total, rows, out.sum);
  for (int row = 0; row < rows; row += 16) {
    const float* const sums = scratch.sums + static_cast<int64_t>(row / kRowLanes * kRowLanes) * size + row % kRowLanes;
    for (int c = 0; c < size; c += 16) {
      Floats columns[16];
      for (int i = 0; i < 16; ++i) columns[i] = load_floats(sums + (c + i) * kRowLanes);
      transpose(columns);
      for (int r = 0; r < std::min(16, rows - row); ++r)
        store_floats(out.values + static_cast<int64_t>(row + r) * size + c, columns[r]);
    }
  }
}

// Attends over the spans that start at keys first_key ... end_key - 1; writes `out`. The tile's queries are rounded
// already.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const PairScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int size = heads.head_dim, rows = tile.rows(), last_key = std::min(end_key, tile.end());
  const size_t blocks = PairScratch::blocks(rows), lanes = blocks * kRowLanes;
  MatrixUnit unit;
  std::fill_n(scratch.maximum, lanes, kMaskedScore);
  std::fill_n(scratch.total, lanes, 0.0f);
  std::fill_n(scratch.sums, lanes * size, 0.0f);
  // Padding lanes of the last block behave as the last row.
  const auto position_of = [&](int row) { return tile.position_of(std::min(row, rows - 1)); };
  const auto oldest_of = [&](int row) { return tile.oldest_of(position_of(row), heads.window); };
  const auto end_of = [&](int row) { return tile.end_of(position_of(row)); };
  for (int key = first_key; key < last_key; key += kSpan) {
    const float* offset = pages.key_offset(key);
    pack_span(pages, key, std::max(key, oldest_of(0)), std::min(key + kSpan, tile.end()),
              tile.seen_width(key, tile.last_position(), kPairKeys), scratch);
    SpanPrefetcher next(pages, key + kSpan, std::min(key + 2 * kSpan, last_key));
    for (int row = 0; row < rows; row += kRowLanes) {
      next.fetch(row / kRowLanes + 1, blocks);
      const int width = tile.seen_width(key, position_of(row + kRowLanes - 1), kPairKeys);
      const int vectors = rows - row > kPanelRows ? 2 : 1;
      if (width <= 0) continue;
      const uint32_t* const query = scratch.query + static_cast<int64_t>(row) * size / 2;
      float* const sums = scratch.sums + static_cast<int64_t>(row) * size;
      const auto score = vectors == 2 ? multiply_lanes<2, false> : multiply_lanes<1, false>;
      score(unit, scratch.keys, size / 2, query, size / 2, width / kAmxRows, scratch.scores);
      for (int lane = 0; lane < vectors * 16; lane += 16) {
        const int first = row + lane;
        if (offset != nullptr || heads.softcap > 0.0f || oldest_of(first + 15) > key || end_of(first) < key + width) {
          SeenKeys seen;
          for (int i = 0; i < 16; ++i) {
            seen.begin[i] = oldest_of(first + i) - key;
            seen.end[i] = end_of(first + i) - key;
          }
          const Floats common = offset == nullptr ? zero_floats() : offset_scores(offset, size, query + lane);
          adjust_scores(scratch.scores + lane, width, common, heads.softcap, seen);
        }
        keep_awake();
        weigh_lanes(scratch.scores + lane, width, scratch.maximum + first, scratch.total + first, size, sums + lane,
                    scratch.weights + lane);
      }
      const auto add_values = vectors == 2 ? multiply_lanes<2, true> : multiply_lanes<1, true>;
      add_values(unit, scratch.values, kSpanPairs, scratch.weights, width / 2, size / kAmxRows, sums);
    }
  }
  store_rows(rows, size, scratch, out);
}

}  // namespace
}  // namespace paged

#endif
