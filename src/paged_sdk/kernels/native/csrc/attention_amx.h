// Products of attention's int8 codes by the matrix unit (matrix_unit.h), 16 rows at a time.
#pragma once

#include "attention_codes.h"

namespace paged {
namespace {

// Sums of 16 rows' products with the first `width` keys of a span: [16, 128].
inline void score_tiles(const CodeScratch& scratch, int row, int size, int width, int32_t (*sums)[kSpan]) {
  constexpr int kPitch = kSpan * sizeof(int32_t);
  const int8_t* queries = scratch.query_codes + static_cast<int64_t>(row) * size;
  see_memory();
  for (int key = 0; key < width; key += 64) {
    zero_sums<2, 2>();
    for (int c = 0; c < size; c += kAmxCols) {
      const uint8_t* keys = scratch.keys + (c * kSpan + key * 4);
      _tile_loadd(4, queries + c, size);
      _tile_loadd(6, keys, 4 * kSpan);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, keys + 64, 4 * kSpan);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(6, keys + 128, 4 * kSpan);
      _tile_dpbssd(2, 4, 6);
      _tile_loadd(7, keys + 192, 4 * kSpan);
      _tile_dpbssd(3, 4, 7);
    }
    _tile_stored(0, sums[0] + key, kPitch);
    _tile_stored(1, sums[0] + key + 16, kPitch);
    _tile_stored(2, sums[0] + key + 32, kPitch);
    _tile_stored(3, sums[0] + key + 48, kPitch);
  }
}

// Adds the values of a span's first `width` keys, weighted, to 16 kWide elements of some of 16 rows.
template <int kWide>
inline void weigh_tiles(const CodeScratch& scratch, int rows, int size, int first_element, int width, float* values) {
  alignas(64) int32_t sums[kWide][kAmxRows][16];
  const int8_t* codes = scratch.values + first_element * 4;
  zero_sums<1, kWide>();
  for (int key = 0; key < width; key += kAmxCols) {
    _tile_loadd(4, scratch.weights + key, kSpan);
    _tile_loadd(6, codes + key * size, 4 * size);
    _tile_dpbusd(0, 4, 6);
    if constexpr (kWide == 2) {
      _tile_loadd(7, codes + key * size + 64, 4 * size);
      _tile_dpbusd(1, 4, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (kWide == 2) _tile_stored(1, sums[1], 64);
  for (int r = 0; r < rows; ++r) {
    const Floats held = broadcast(scratch.factors[r]);
    const Floats added = broadcast(scratch.factors[kCodeRows + r]);
    for (int v = 0; v < kWide; ++v) {
      float* to = values + static_cast<int64_t>(r) * size + 16 * v;
      store_floats(to, fma(to_floats(_mm512_load_si512(sums[v][r])), added, mul(held, load_floats(to))));
    }
  }
}

// Products of 16 rows with what a span's keys are coded less; those of rows past `rows` are zero.
inline Floats common_scores(const CodedSpan& span, int row, int rows) {
  alignas(64) float lanes[kAmxRows][kSumLanes] = {};
  const int size = span.heads.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float* query = span.scratch.queries + static_cast<int64_t>(row + r) * size;
    Floats sum = zero_floats();
    for (int c = 0; c < size; c += 16) sum = fma(load_floats(query + c), load_floats(span.common + c), sum);
    store_lanes(lanes[r], sum);
  }
  return sums_of(lanes);
}

// Attends with all rows of a tile over a span.
inline void attend_coded_span(const CodedSpan& span, const Partial& out) {
  const CodeScratch& scratch = span.scratch;
  const int rows = span.tile.rows(), size = span.heads.head_dim;
  alignas(64) int32_t sums[kAmxRows][kSpan];
  const auto width_of = [&](int row) { return span.width_of(span.position_of(std::min(row + kAmxRows, rows) - 1)); };
  int row = 0;
  while (width_of(row) <= 0) row += kAmxRows;  // the last row sees some keys
  score_tiles(scratch, row, size, width_of(row), sums);
  for (; row < rows; row += kAmxRows) {
    const int count = std::min(rows - row, kAmxRows), width = width_of(row);
    alignas(64) float constants[kAmxRows] = {};
    if (span.common != nullptr) store_floats(constants, common_scores(span, row, count));
    SpanWeights weights[kAmxRows];
    for (int r = 0; r < count; ++r) {
      const Floats factor = broadcast(scratch.query_scales[row + r]), constant = broadcast(constants[r]);
      const auto score_of = [&](int i) __attribute__((always_inline)) {
        const Floats product = to_floats(_mm512_load_si512(sums[r] + 16 * i));
        return fma(mul(product, load_floats(scratch.key_scales + 16 * i)), factor, constant);
      };
      weights[r] = span.code_row(row + r, width, score_of, scratch.weights + r * kSpan);
      if (r % 4 == 3) keep_awake();
    }
    // The next rows' scores first: tiles are loaded from where the weights' bytes will have come to meanwhile.
    if (row + kAmxRows < rows) score_tiles(scratch, row + kAmxRows, size, width_of(row + kAmxRows), sums);
    add_weights(weights, count, out.maximum + row, out.sum + row, scratch.factors, scratch.factors + kCodeRows);
    float* values = out.values + static_cast<int64_t>(row) * size;
    int c = 0;
    for (; c + 32 <= size; c += 32) weigh_tiles<2>(scratch, count, size, c, width, values + c);
    if (c < size) weigh_tiles<1>(scratch, count, size, c, width, values + c);
  }
}

}  // namespace
}  // namespace paged
