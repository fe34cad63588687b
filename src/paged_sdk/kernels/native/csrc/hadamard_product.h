// Multiplies many rows in int8: activations and weights go through the same block-diagonal Hadamard transform and have
// one scale per row and block of columns (layout.h), so that nothing but dot products is left in the inner loop. A
// thread makes the codes of two panels at a time in memory of its own, which its cache holds, and multiplies them with
// all rows: on AMD Zen 4 that takes as long as 14 rows do.
#pragma once

#include "functions.h"
#include "linear.h"
#include "hadamard.h"
#include "hadamard_panel.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "hadamard_neon.h"
#endif

namespace paged {
namespace {

// Activations in the Hadamard form, in tiles of kTokenTile rows, each [cols / 4][kTokenTile][4]: one stream for the
// inner loop, whatever the width. Of each block of columns a tile has kTokenTile scales and as many offsets.
struct HadamardRows {
  int8_t* codes;
  float* scales;
  int32_t* offsets;  // -128 times the sum of a block's codes: weights are stored plus 128
  uint8_t* panels;   // per thread, the codes of two panels
  int num_rows;
  int cols;

  static int tiles(int num_rows) { return (num_rows + kTokenTile - 1) / kTokenTile; }
  static size_t bytes(int num_rows, int cols, int num_threads) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    return line_aligned(padded * cols) + 2 * line_aligned(padded * scale_blocks(cols) * sizeof(float)) +
           2 * RotatedPanel::bytes(cols) * num_threads;
  }
  static HadamardRows at(uint8_t* memory, int num_rows, int cols) {
    const size_t padded = static_cast<size_t>(tiles(num_rows)) * kTokenTile;
    const size_t numbers = line_aligned(padded * scale_blocks(cols) * sizeof(float));
    uint8_t* scales = memory + line_aligned(padded * cols);
    return {reinterpret_cast<int8_t*>(memory),
            reinterpret_cast<float*>(scales),
            reinterpret_cast<int32_t*>(scales + numbers),
            scales + 2 * numbers,
            num_rows,
            cols};
  }
  int8_t* tile(int64_t index) const { return codes + index * kTokenTile * cols; }
  int64_t block(int64_t tile, int index) const { return (tile * scale_blocks(cols) + index) * kTokenTile; }
  RotatedPanel panel(int thread, int index) const {
    return RotatedPanel::at(panels + (2 * thread + index) * RotatedPanel::bytes(cols), cols);
  }
};

// Quantizes the rows of a tile, times 1 / rms and norm_weight where that is given, and rows of zeros where there are no
// more: a tile is multiplied whole, or up to an even number of its rows. Rows are taken together, block by block, so
// that codes are stored as whole vectors: a row at a time, four bytes here and there, took 1.7 times as long on AMD
// Zen 4.
inline void hadamard_tile(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t tile) {
  alignas(64) float numbers[kTokenTile][kScaleCols];  // of one block
  float factors[kTokenTile] = {}, inverses[kTokenTile];
  const int64_t first = tile * kTokenTile;
  const int rows = out.num_rows - first < kTokenTile ? static_cast<int>(out.num_rows - first) : kTokenTile;
  for (int r = 0; r < rows; ++r) inverses[r] = norm_weight != nullptr ? inverse_rms(x, first + r, out.cols, eps) : 1.0f;
  if (rows < kTokenTile) __builtin_memset(numbers[rows], 0, sizeof(numbers[0]) * (kTokenTile - rows));
  int8_t* quads = out.tile(tile);
  for (int b = 0, col = 0; col < out.cols; ++b, col += kScaleCols) {
    const int groups = std::min(out.cols - col, kScaleCols) / kGroup;
    const int64_t at = out.block(tile, b);
    for (int r = 0; r < kTokenTile; ++r)
      out.scales[at + r] =
          r < rows ? inverses[r] * transform_row(x, first + r, col, groups, norm_weight, numbers[r], factors[r]) : 0.0f;
    Ints sums[kTokenTile];
    for (int r = 0; r < kTokenTile; ++r) sums[r] = zero_ints();
    for (int i = 0; i < groups * kGroup; i += 16, quads += 16 * kTokenTile) {
      Ints codes[kTokenTile];
#pragma GCC unroll 8
      for (int r = 0; r < kTokenTile; ++r) {
        codes[r] = to_nearest(mul(load_floats(numbers[r] + i), broadcast(factors[r])));
        sums[r] = add(sums[r], codes[r]);
      }
      store_quads(quads, codes);
    }
    for (int r = 0; r < kTokenTile; ++r) out.offsets[at + r] = -128 * sum_of(sums[r]);
  }
}

// Quantizes the tiles [first, last) of rows.
inline void hadamard_tiles(const Matrix& x, const float* norm_weight, float eps, const HadamardRows& out, int64_t first,
                           int64_t last) {
  for (int64_t tile = first; tile < last; ++tile) hadamard_tile(x, norm_weight, eps, out, tile);
}

// What a row's sums begin with.
inline Ints first_sum(const int32_t* offset) {
  if constexpr (kTakesOff128) return zero_ints();
  return broadcast_shifted<0>(offset);
}

// sum[r] += a panel . row r of a tile: of instruction sets that multiply panel by panel (dots_avx2.h, hadamard_neon.h).
template <int kRows>
void dot_panel(const uint8_t* weights, const int8_t* codes, int64_t quads, Ints (&sum)[kRows]);

// kPanels panels times kRows rows of one tile; products are complete but for biases. They lie in the caller's memory,
// and this is a function of its own: with local sums, inlined where it is used, the compiler moved registers about for
// up to a tenth of the time.
template <int kPanels, int kRows>
[[gnu::noinline]] void multiply_hadamard_tile(const RotatedPanel (&panels)[kPanels], const HadamardRows& x, int tile,
                                              Floats (&products)[kPanels][kRows]) {
  const int8_t* codes = x.tile(tile);
  const uint8_t* weights[kPanels];
  for (int p = 0; p < kPanels; ++p) weights[p] = panels[p].codes;
  for (int b = 0; b < scale_blocks(x.cols); ++b) {
    const int64_t block = x.block(tile, b);
    Ints sum[kPanels][kRows];
    for (int p = 0; p < kPanels; ++p)
      for (int r = 0; r < kRows; ++r) sum[p][r] = first_sum(x.offsets + block + r);
    const int groups = std::min(x.cols - b * kScaleCols, kScaleCols) / kGroup;
    if constexpr (kPanelByPanel) {
      const int64_t quads = groups * (kGroup / 4);
      for (int p = 0; p < kPanels; ++p, weights[p - 1] += quads * kVector)
        dot_panel<kRows>(weights[p], codes, quads, sum[p]);
      codes += quads * 4 * kTokenTile;
    } else {
      for (int group = 0; group < groups; ++group) {
#pragma GCC unroll 8
        for (int quad = 0; quad < kGroup / 4; ++quad, codes += 4 * kTokenTile) {
          Bytes w[kPanels];
          for (int p = 0; p < kPanels; ++p, weights[p - 1] += kVector) w[p] = load_bytes(weights[p]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
            for (int p = 0; p < kPanels; ++p) sum[p][r] = dot4<true>(sum[p][r], w[p], codes + 4 * r);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      const Floats scale = load_floats(panels[p].scales + b * kPanelRows);
      for (int r = 0; r < kRows; ++r) {
        const Floats product = mul(to_floats(sum[p][r]), scale), factor = broadcast(x.scales[block + r]);
        products[p][r] = b == 0 ? mul(product, factor) : fma(product, factor, products[p][r]);
      }
    }
  }
}

// Multiplies some rows of a tile; emit(row, products) takes what is finished but for biases.
template <int kPanels, int kRows, class Emit>
inline void multiply_hadamard_rows(const RotatedPanel (&panels)[kPanels], const HadamardRows& x, int tile,
                                   const Emit& emit) {
  Floats products[kPanels][kRows];
  multiply_hadamard_tile(panels, x, tile, products);
  const int64_t first = static_cast<int64_t>(tile) * kTokenTile;
  const int rows = x.num_rows - first < kRows ? static_cast<int>(x.num_rows - first) : kRows;
  for (int r = 0; r < rows; ++r) {
    Floats finished[kPanels];
    for (int p = 0; p < kPanels; ++p) finished[p] = products[p][r];
    emit(first + r, finished);
  }
}

template <int kPanels, class Emit>
inline void multiply_hadamard_panels(const RotatedPanel (&panels)[kPanels], const HadamardRows& x, const Emit& emit) {
  for (int t = 0; t < HadamardRows::tiles(x.num_rows); ++t) {
    const int rows = x.num_rows - t * kTokenTile;
    if (kTokenTile == 2 || rows <= 2) {
      multiply_hadamard_rows<kPanels, 2>(panels, x, t, emit);
    } else if (rows <= kTokenTile / 2) {
      multiply_hadamard_rows<kPanels, kTokenTile / 2>(panels, x, t, emit);
    } else {
      multiply_hadamard_rows<kPanels, kTokenTile>(panels, x, t, emit);
    }
  }
}

// A panel's codes take as long to make as so many rows to multiply.
constexpr int kRotationRows = 14;

// Pairs of panels, which are multiplied together; the last may be a single one.
inline int64_t hadamard_pairs(const paged_weight& weight) { return (num_panels(weight.rows) + 1) / 2; }

// out[:, concat of the weights' rows] = x . W^T: the pairs of panels [first, last) of all weights.
inline void multiply_hadamard(const paged_weight* weights, const HadamardRows& x, const Output& out, int64_t first,
                              int64_t last, int thread) {
  const RotatedPanel panels[2] = {x.panel(thread, 0), x.panel(thread, 1)};
  int64_t before = 0, col = 0;
  for (const paged_weight* next = weights; before < last; ++next) {
    const paged_weight& w = *next;
    const int64_t count = num_panels(w.rows), pairs = hadamard_pairs(w);
    const int64_t begin = first > before ? first - before : 0, end = last - before < pairs ? last - before : pairs;
    for (int64_t pair = begin; pair < end; ++pair) {
      const auto emit = [&](int p, int64_t row, Floats product) {
        const int64_t at = (2 * pair + p) * kPanelRows;
        const int width = w.rows - at < kPanelRows ? static_cast<int>(w.rows - at) : kPanelRows;
        out.store(row, col + at, width, product, w.bias != nullptr ? w.bias + at : nullptr);
      };
      rotate_panel(w, 2 * pair, panels[0]);
      if (2 * pair + 1 < count) {
        rotate_panel(w, 2 * pair + 1, panels[1]);
        multiply_hadamard_panels(panels, x, [&](int64_t row, const Floats(&products)[2]) {
          emit(0, row, products[0]);
          emit(1, row, products[1]);
        });
      } else {
        multiply_hadamard_panels<1>({panels[0]}, x,
                                    [&](int64_t row, const Floats(&products)[1]) { emit(0, row, products[0]); });
      }
    }
    before += pairs;
    col += w.rows;
  }
}

// hidden[:, p * 16 ...] = activation(gate x) * (up x) of the panels [first, last): one of each at a time.
inline void multiply_hadamard_gated(const paged_weight& gate, const paged_weight& up, const HadamardRows& x,
                                    int32_t activation, float* hidden, int64_t first, int64_t last, int thread) {
  const RotatedPanel panels[2] = {x.panel(thread, 0), x.panel(thread, 1)};
  for (int64_t p = first; p < last; ++p) {
    rotate_panel(gate, p, panels[0]);
    rotate_panel(up, p, panels[1]);
    multiply_hadamard_panels(panels, x, [&](int64_t row, const Floats(&products)[2]) {
      store_floats(hidden + row * gate.rows + p * kPanelRows,
                   gate_columns(gate, up, p * kPanelRows, products[0], products[1], activation));
    });
  }
}

}  // namespace
}  // namespace paged
