// Multiplies many rows in int8. Activations and weights go through the same block-diagonal Hadamard transform and have
// one scale per row and block of columns (layout.h), which leaves only dot products in the inner loop. A thread makes
// the codes of two panels at a time in its own scratch memory, which stays in its cache, and multiplies them with all
// rows; making them takes as long as multiplying 14 rows on AMD Zen 4. AMX processes four panels at a time
// (hadamard_amx.h).
#pragma once

#include "functions.h"
#include "hadamard_rows.h"
#include "linear.h"
#if defined(__AMX_INT8__)
#include "hadamard_amx.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "hadamard_neon.h"
#endif

namespace paged {
namespace {

#if !defined(__AMX_INT8__)

// Returns the initial value of a row's sums.
inline Ints first_sum(const int32_t* offset) {
  if constexpr (kDotSubtracts128) return zero_ints();
  return broadcast_shifted<0>(offset);
}

// sum[r] += a panel . row r of a tile, on ISA levels that multiply one panel at a time (dots_avx2.h, hadamard_neon.h).
template <int kRows>
void dot_panel(const uint8_t* weights, const int8_t* codes, int64_t quads, Ints (&sum)[kRows]);

// Register tile of kPanels panels and kRows rows; products are complete except for biases. Products are in the caller's
// memory and the function is not inlined: with local accumulators, inlined, the compiler spent up to a tenth of the
// time on moving registers.
template <int kPanels, int kRows>
[[gnu::noinline]] void multiply_hadamard_tile(const HadamardPanel (&panels)[kPanels], const HadamardRows& x, int tile,
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
    if constexpr (kOnePanelAtATime) {
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

// Multiplies some rows of a tile; emit(row, products) receives the results, complete except for biases.
template <int kPanels, int kRows, class Emit>
inline void multiply_hadamard_rows(const HadamardPanel (&panels)[kPanels], const HadamardRows& x, int tile,
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
inline void multiply_hadamard_panels(const HadamardPanel (&panels)[kPanels], const HadamardRows& x, const Emit& emit) {
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

// Multiplies one or two panels with all rows; emit(0, row, products) receives the results, complete except for biases.
template <class Emit, class Fetch>
inline void multiply_hadamard_group(const HadamardPanel* panels, int count, const HadamardRows& x, const Emit& emit,
                                    const Fetch&) {
  if (count == 2) {
    multiply_hadamard_panels<2>({panels[0], panels[1]}, x,
                                [&](int64_t row, const Floats(&products)[2]) { emit(0, row, products); });
  } else {
    multiply_hadamard_panels<1>({panels[0]}, x, [&](int64_t row, const Floats(&products)[1]) {
      emit(0, row, {products[0], products[0]});
    });
  }
}

#endif

// Making a panel's codes takes as long as multiplying this many rows by vector instructions. AMX multiplies four rows
// in the time of one.
constexpr int kPanelCodingRows = 14;
inline int hadamard_rows_paid(int num_rows) { return num_rows / (kHasMatrixUnit ? 4 : 1) + kPanelCodingRows; }

// Number of pairs of panels, which are multiplied together; the last may be a single panel.
inline int64_t hadamard_pairs(const paged_weight& weight) { return (num_panels(weight.rows) + 1) / 2; }

// out[:, concat of the weights' rows] = x . W^T, for pairs of panels [first, last) of all weights.
inline void multiply_hadamard(const paged_weight* weights, const HadamardRows& x, const Output& out, int64_t first,
                              int64_t last, int thread) {
  [[maybe_unused]] const MatrixUnit unit;
  int64_t before = 0, col = 0;
  for (const paged_weight* next = weights; before < last; ++next) {
    const paged_weight& w = *next;
    const int64_t pairs = hadamard_pairs(w);
    const int64_t begin = first > before ? first - before : 0, end = last - before < pairs ? last - before : pairs;
    for (int64_t pair = begin; pair < end; pair += kPairsTogether) {
      HadamardPanel panels[2 * kPairsTogether];
      const int64_t first_panel = 2 * pair, last_panel = 2 * std::min(pair + kPairsTogether, end);
      const int count = static_cast<int>(std::min(last_panel, num_panels(w.rows)) - first_panel);
      for (int p = 0; p < count; ++p) make_hadamard_panel(w, first_panel + p, panels[p] = x.panel(thread, p));
      const auto emit = [&](int i, int64_t row, const Floats(&products)[2]) {
        for (int p = 2 * i; p < 2 * i + 2 && p < count; ++p) {
          const int64_t at = (first_panel + p) * kPanelRows;
          const int width = w.rows - at < kPanelRows ? static_cast<int>(w.rows - at) : kPanelRows;
          out.store(row, col + at, width, products[p % 2], w.bias != nullptr ? w.bias + at : nullptr);
        }
      };
      multiply_hadamard_group(panels, count, x, emit, [&](int64_t row) {
        for (int p = 0; p < count; ++p) out.fetch(row, col + (first_panel + p) * kPanelRows);
      });
    }
    before += pairs;
    col += w.rows;
  }
}

// hidden[:, p * 16 ...] = activation(gate x) * (up x) for panels [first, last); a gate panel and an up panel form a
// pair.
inline void multiply_hadamard_gated(const paged_weight& gate, const paged_weight& up, const HadamardRows& x,
                                    int32_t activation, float* hidden, int64_t first, int64_t last, int thread) {
  [[maybe_unused]] const MatrixUnit unit;
  for (int64_t p = first; p < last; p += kPairsTogether) {
    HadamardPanel panels[2 * kPairsTogether];
    const int pairs = last - p < kPairsTogether ? static_cast<int>(last - p) : kPairsTogether;
    for (int i = 0; i < pairs; ++i) {
      make_hadamard_panel(gate, p + i, panels[2 * i] = x.panel(thread, 2 * i));
      make_hadamard_panel(up, p + i, panels[2 * i + 1] = x.panel(thread, 2 * i + 1));
    }
    const auto emit = [&](int i, int64_t row, const Floats(&products)[2]) {
      const int64_t at = (p + i) * kPanelRows;
      store_floats(hidden + row * gate.rows + at, gate_columns(gate, up, at, products[0], products[1], activation));
    };
    multiply_hadamard_group(panels, 2 * pairs, x, emit, [&](int64_t row) {
      for (int i = 0; i < pairs; ++i) __builtin_prefetch(hidden + row * gate.rows + (p + i) * kPanelRows, 1, 2);
    });
  }
}

}  // namespace
}  // namespace paged
