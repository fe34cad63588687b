// Multiplies with dense weights: bfloat16, float16 or float32 numbers of a checkpoint, in panels (layout.h).
//
// Products are exact and accumulators are float32. Sums run over the columns in ascending order, whatever the number of
// rows or threads, so results are the same for every batch. Dot products of bfloat16 pairs flush subnormal numbers to
// zero.
#pragma once

#include "dense_pairs_amx.h"
#include "dense_tiles.h"
#include "linear.h"

namespace paged {
namespace {

// Panels that are multiplied together: a tile's, but at least two, since a gate panel and an up panel are a pair.
constexpr int kDenseGroup = kDensePanels > 2 ? kDensePanels : 2;

// The same with AMX and bfloat16 weights. The sums of a group's panels and a block of all rows share the second-level
// cache. Rows that do not fit come from the third level for every group, so that larger groups read them less often.
// SmolLM2's prompts ran 2 % slower with four panels and 6 % slower with eight, and 512 rows of 8,960 columns took 10.2
// ms with two, 7.0 with four, and 6.4 with eight (2 MiB of second-level cache).
constexpr int kPairGroup = 2, kFarPairGroup = 8;
constexpr int64_t kNearBytes = 3 << 19;  // bytes of rows that fit the second-level cache beside the weights
inline bool rows_are_far(int vectors, int num_rows) { return int64_t{4} * vectors * num_rows > kNearBytes; }

// Returns the number of panels that a thread processes together.
inline int dense_unit(const paged_weight& weight, int num_rows) {
  if (!kHasMatrixUnit || weight.format != PAGED_DENSE_BFLOAT16) return kDenseGroup;
  return rows_are_far(dense_vectors(weight.format, weight.cols), num_rows) ? kFarPairGroup : kPairGroup;
}

// sums[v][r] = panel v . row r of x, for kGroup panels and all rows. `next` are the panels that are multiplied
// afterwards. The rows decide how many panels a tile has: all of the group's while one tile holds all rows.
template <class Dense, int kGroup>
inline void multiply_dense_panels(const uint8_t* const (&panels)[kGroup], const uint8_t* const (&next)[kGroup],
                                  const DenseRows& x, float (*sums)[kPanelRows]) {
  if (x.num_rows == 0) return;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Dense, DenseBfloat16>) return multiply_pair_panels<kGroup>(panels, next, x, sums);
#endif
  if constexpr (kGroup > kDensePanels) {
    if (x.num_rows > kTallest<kGroup>) return multiply_dense_tiles<Dense, kDensePanels>(panels, next, x, sums);
  }
  multiply_dense_tiles<Dense, kGroup>(panels, next, x, sums);
}

// Multiplies panels [p, end), kWide at a time, while that many remain. panel_at(i) returns the address of panel i, and
// emit(p, integral_constant<kWide>, sums) receives the results.
template <class Dense, int kWide, class PanelAt, class Emit>
inline void multiply_dense_run(int64_t& p, int64_t end, const DenseRows& x, float (*sums)[kPanelRows],
                               const PanelAt& panel_at, const Emit& emit) {
  for (; end - p >= kWide; p += kWide) {
    const uint8_t *panels[kWide], *next[kWide];
    for (int v = 0; v < kWide; ++v) panels[v] = panel_at(p + v), next[v] = panel_at(p + kWide + v);
    multiply_dense_panels<Dense, kWide>(panels, next, x, sums);
    emit(p, std::integral_constant<int, kWide>{}, sums);
  }
}

// The same for all panels [p, end). With one tile of rows, the product is bound by memory, and two panels are enough.
template <class PanelAt, class Emit>
inline void multiply_dense_range(int32_t format, int64_t p, int64_t end, const DenseRows& x,
                                 float (*sums)[kPanelRows], const PanelAt& panel_at, const Emit& emit) {
  with_dense(format, [&](auto of) {
    using Dense = decltype(of);
    if constexpr (kHasMatrixUnit && std::is_same_v<Dense, DenseBfloat16>) {
      if (rows_are_far(x.vectors, x.num_rows))
        multiply_dense_run<Dense, kFarPairGroup>(p, end, x, sums, panel_at, emit);
    } else if (x.num_rows > kDenseRows) {
      multiply_dense_run<Dense, kDenseGroup>(p, end, x, sums, panel_at, emit);
    }
    multiply_dense_run<Dense, 2>(p, end, x, sums, panel_at, emit);
    multiply_dense_run<Dense, 1>(p, end, x, sums, panel_at, emit);
  });
}

// out[:, concat of the weights' rows] = x . W^T, for panels [first, last) of all weights.
inline void multiply_dense_weights(const paged_weight* weights, const DenseRows& x, const Output& out,
                                   float (*sums)[kPanelRows], int64_t first, int64_t last) {
  const int64_t bytes = dense_panel_bytes(weights[0].format, weights[0].cols);
  int64_t before = 0, col = 0;
  for (const paged_weight* next = weights; before < last; ++next) {
    const paged_weight& w = *next;
    const int64_t count = num_panels(w.rows);
    const int64_t begin = first > before ? first - before : 0, end = last - before < count ? last - before : count;
    multiply_dense_range(
        w.format, begin, end, x, sums, [&](int64_t panel) { return w.data + panel * bytes; },
        [&](int64_t panel, auto wide, const float (*finished)[kPanelRows]) {
          // Row by row, because the panels' columns of a row are adjacent.
          for (int r = 0; r < x.num_rows; ++r) {
            for (int v = 0; v < decltype(wide)::value; ++v) {
              const int64_t at = (panel + v) * kPanelRows;
              const int width = w.rows - at < kPanelRows ? static_cast<int>(w.rows - at) : kPanelRows;
              const float* bias = w.bias != nullptr ? w.bias + at : nullptr;
              out.store(r, col + at, width, load_floats(finished[static_cast<int64_t>(v) * x.num_rows + r]), bias);
            }
          }
        });
    before += count;
    col += w.rows;
  }
}

// activation(gate x) * (up x) for panels [first, last). Gate and up panels of the same rows alternate: panel 2 p is the
// gate's, 2 p + 1 the up's. take(col, columns) receives 16 columns of all rows, as columns(row).
template <class Take>
inline void multiply_dense_gated(const paged_weight& gate, const paged_weight& up, const DenseRows& x,
                                 int32_t activation, float (*sums)[kPanelRows], int64_t first, int64_t last,
                                 const Take& take) {
  const int64_t bytes = dense_panel_bytes(gate.format, gate.cols);
  multiply_dense_range(
      gate.format, 2 * first, 2 * last, x, sums,
      [&](int64_t panel) { return (panel % 2 == 0 ? gate : up).data + panel / 2 * bytes; },
      [&](int64_t panel, auto wide, const float (*finished)[kPanelRows]) {
        for (int v = 0; v + 1 < decltype(wide)::value; v += 2) {
          const int64_t at = (panel + v) / 2 * kPanelRows;
          const float (*gates)[kPanelRows] = finished + static_cast<int64_t>(v) * x.num_rows;
          take(at, [&](int row) {
            const Floats of_gate = load_floats(gates[row]), of_up = load_floats(gates[x.num_rows + row]);
            return gate_columns(gate, up, at, of_gate, of_up, activation);
          });
        }
      });
}

// hidden = activation(gate x) * (up x), in float32.
inline void multiply_dense_gated(const paged_weight& gate, const paged_weight& up, const DenseRows& x,
                                 int32_t activation, float* hidden, float (*sums)[kPanelRows], int64_t first,
                                 int64_t last) {
  const Output out{hidden, gate.rows, PAGED_FLOAT32, {}};
  multiply_dense_gated(gate, up, x, activation, sums, first, last, [&](int64_t col, const auto& columns) {
    const int width = gate.rows - col < kPanelRows ? static_cast<int>(gate.rows - col) : kPanelRows;
    for (int r = 0; r < x.num_rows; ++r) out.store(r, col, width, columns(r), nullptr);
  });
}

// The same, in the form that the dense weight `down` multiplies.
inline void multiply_dense_gated(const paged_weight& gate, const paged_weight& up, const DenseRows& x,
                                 int32_t activation, const paged_weight& down, const DenseRows& hidden,
                                 float (*sums)[kPanelRows], int64_t first, int64_t last) {
  multiply_dense_gated(gate, up, x, activation, sums, first, last, [&](int64_t col, const auto& columns) {
    with_dense(down.format, [&](auto of) {
      for (int r = 0; r < x.num_rows; ++r) hidden.store<decltype(of)>(r, col, columns(r));
    });
  });
}

}  // namespace
}  // namespace paged
