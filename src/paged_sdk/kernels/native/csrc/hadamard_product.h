// Multiplies many rows in int8: activations and weights went through the same block-diagonal Hadamard transform and
// have one scale per row each, so that nothing but dot products is left in the inner loop.
#pragma once

#include "functions.h"
#include "linear.h"
#include "hadamard.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "hadamard_neon.h"
#endif

namespace paged {
namespace {

// Activations in the Hadamard form, in tiles of kTokenTile rows, each [cols / 4][kTokenTile][4]: one stream for the
// inner loop, whatever the width.
struct HadamardRows {
  int8_t* codes;
  float* scales;
  int32_t* offsets;  // -128 times the sum of a row's codes: weights are stored plus 128
  float* own;        // per thread, one row in float32
  int num_rows;
  int cols;

  static int tiles(int num_rows) { return (num_rows + kTokenTile - 1) / kTokenTile; }
  static size_t bytes(int num_rows, int cols, int num_threads) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    return line_aligned(padded * cols) + 2 * line_aligned(padded * sizeof(float)) +
           line_aligned(sizeof(float) * cols) * num_threads;
  }
  static HadamardRows at(uint8_t* memory, int num_rows, int cols) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    const size_t numbers = line_aligned(padded * sizeof(float));
    uint8_t* scales = memory + line_aligned(padded * cols);
    return {reinterpret_cast<int8_t*>(memory),
            reinterpret_cast<float*>(scales),
            reinterpret_cast<int32_t*>(scales + numbers),
            reinterpret_cast<float*>(scales + 2 * numbers),
            num_rows,
            cols};
  }
  int8_t* tile(int64_t index) const { return codes + index * kTokenTile * cols; }
};

// Quantizes rows of x, times 1 / rms and norm_weight where that is given: the tiles [first, last). Whole ones, so that
// two threads never write codes in one cache line.
inline void hadamard_tiles(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t first,
                           int64_t last, int thread) {
  const int cols = out.cols, block = hadamard_block(cols);
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(block));
  float* own = out.own + thread * (line_aligned(sizeof(float) * cols) / sizeof(float));
  for (int64_t row = first * kTokenTile; row < last * kTokenTile; ++row) {
    int8_t* quads = out.tile(row / kTokenTile) + row % kTokenTile * 4;
    if (row >= out.num_rows) {  // a tile is multiplied whole, or up to an even number of its rows
      for (int c = 0; c < cols; c += 4) __builtin_memset(quads + c * kTokenTile, 0, 4);
      out.scales[row] = 0.0f;
      out.offsets[row] = 0;
      continue;
    }
    const float unit = load_row(x, row, cols, norm_weight, eps, own);
    const uint32_t largest = static_cast<uint32_t>(max_of(hadamard_row(own, cols, block)));
    out.offsets[row] = -128 * quantize_quads<kTokenTile * 4, 0>(own, cols, largest, quads);
    out.scales[row] = unit_of(largest) * (unit * norm);
  }
}

// Which part of the next panels to fetch while this one is multiplied: every tile of rows fetches its own, so that
// memory is busy all the time. One, two or four tiles fetch everything between them; those after them repeat a line.
struct Ahead {
  int64_t first;  // byte of a panel
  int step;       // bytes for every quad

  Ahead(int tile, int tiles, int cols)
      : first(0), step(tiles == 1 ? kVector : tiles < 4 ? kVector / 2 : kVector / 4) {
    first = static_cast<int64_t>(tile) * step * (cols / 4);
    if (first + step > static_cast<int64_t>(cols) * kPanelRows) first = 0, step = 0;
  }
};

// What a row's sums begin with.
inline Ints first_sum(const int32_t* offset) {
  if constexpr (kTakesOff128) return zero_ints();
  return broadcast_shifted<0>(offset);
}

// kPanels panels times kRows rows of one tile; emit(row, products) takes what is finished but for biases. Sums fit
// 32 bits all the way up to 2^31 / (127 * 128) = 132,000 columns.
template <int kPanels, int kRows, class Emit>
inline void multiply_hadamard_tile(const uint8_t* const (&panels)[kPanels], const uint8_t* const (&next)[kPanels],
                                  const HadamardRows& x, int tile, const Ahead& ahead, const Emit& emit) {
  const int64_t row = static_cast<int64_t>(tile) * kTokenTile;
  Ints sum[kPanels][kRows];
  for (int p = 0; p < kPanels; ++p)
    for (int r = 0; r < kRows; ++r) sum[p][r] = first_sum(x.offsets + row + r);
  const int8_t* codes = x.tile(tile);
  const uint8_t *weights[kPanels], *to_fetch[kPanels];
  for (int p = 0; p < kPanels; ++p) weights[p] = panels[p] + kHadamardHeader, to_fetch[p] = next[p] + ahead.first;
#if defined(__ARM_FEATURE_DOTPROD)
  for (int p = 0; p < kPanels; ++p)
    dot_panel<kRows>(weights[p], {to_fetch[p], ahead.step}, codes, x.cols / 4, sum[p]);
#else
  int64_t fetched = 0;
#pragma GCC unroll 8
  for (int64_t quad = 0; quad < x.cols / 4; ++quad, codes += 4 * kTokenTile, fetched += ahead.step) {
    Bytes w[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      __builtin_prefetch(to_fetch[p] + fetched, 0, 2);
      w[p] = load_bytes(weights[p] + quad * kVector);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) sum[p][r] = dot4<true>(sum[p][r], w[p], codes + 4 * r);
  }
#endif
  const int rows = x.num_rows - row < kRows ? static_cast<int>(x.num_rows - row) : kRows;
  for (int r = 0; r < rows; ++r) {
    const Floats scale = broadcast(x.scales[row + r]);
    Floats products[kPanels];
    for (int p = 0; p < kPanels; ++p)
      products[p] =
          mul(mul(to_floats(sum[p][r]), load_floats(reinterpret_cast<const float*>(panels[p]))), scale);
    emit(row + r, products);
  }
}

template <int kPanels, class Emit>
inline void multiply_hadamard_panels(const uint8_t* const (&panels)[kPanels], const uint8_t* const (&next)[kPanels],
                                    const HadamardRows& x, const Emit& emit) {
  const int tiles = HadamardRows::tiles(x.num_rows);
  for (int t = 0; t < tiles; ++t) {
    const Ahead ahead(t, tiles, x.cols);
    const int rows = x.num_rows - t * kTokenTile;
    if (kTokenTile == 2 || rows <= 2) {
      multiply_hadamard_tile<kPanels, 2>(panels, next, x, t, ahead, emit);
    } else if (rows <= kTokenTile / 2) {
      multiply_hadamard_tile<kPanels, kTokenTile / 2>(panels, next, x, t, ahead, emit);
    } else {
      multiply_hadamard_tile<kPanels, kTokenTile>(panels, next, x, t, ahead, emit);
    }
  }
}

inline int64_t hadamard_pairs(const paged_weight& weight) { return (num_panels(weight.rows) + 1) / 2; }

// out[:, concat of the weights' rows] = x . W^T: the pairs of panels [first, last) of all weights.
inline void multiply_hadamard(const paged_weight* weights, const HadamardRows& x, const Output& out, int64_t first,
                              int64_t last) {
  const int64_t bytes = hadamard_panel_bytes(x.cols);
  int64_t before = 0, col = 0;
  for (const paged_weight* next = weights; before < last; ++next) {
    const paged_weight& w = *next;
    const int64_t count = num_panels(w.rows), pairs = hadamard_pairs(w);
    const int64_t begin = first > before ? first - before : 0, end = last - before < pairs ? last - before : pairs;
    for (int64_t pair = begin; pair < end; ++pair) {
      const uint8_t* panel = w.data + 2 * pair * bytes;
      const auto emit = [&](int p, int64_t row, Floats product) {
        const int64_t at = (2 * pair + p) * kPanelRows;
        const int width = w.rows - at < kPanelRows ? static_cast<int>(w.rows - at) : kPanelRows;
        out.store(row, col + at, width, product, w.bias != nullptr ? w.bias + at : nullptr);
      };
      if (2 * pair + 1 < count) {
        multiply_hadamard_panels<2>({panel, panel + bytes}, {panel + 2 * bytes, panel + 3 * bytes}, x,
                                   [&](int64_t row, const Floats(&products)[2]) {
                                     emit(0, row, products[0]);
                                     emit(1, row, products[1]);
                                   });
      } else {
        multiply_hadamard_panels<1>({panel}, {panel + bytes}, x,
                                   [&](int64_t row, const Floats(&products)[1]) { emit(0, row, products[0]); });
      }
    }
    before += pairs;
    col += w.rows;
  }
}

// hidden[:, p * 16 ...] = activation(gate x) * (up x) of the panels [first, last): one of each at a time.
inline void multiply_hadamard_gated(const paged_weight& gate, const paged_weight& up, const HadamardRows& x,
                                    int32_t activation, float* hidden, int64_t first, int64_t last) {
  const int64_t bytes = hadamard_panel_bytes(x.cols);
  for (int64_t p = first; p < last; ++p) {
    const uint8_t *a = gate.data + p * bytes, *b = up.data + p * bytes;
    multiply_hadamard_panels<2>({a, b}, {a + bytes, b + bytes}, x, [&](int64_t row, const Floats(&products)[2]) {
      store_floats(hidden + row * gate.rows + p * kPanelRows,
                   gate_columns(gate, up, p * kPanelRows, products[0], products[1], activation));
    });
  }
}

}  // namespace
}  // namespace paged
