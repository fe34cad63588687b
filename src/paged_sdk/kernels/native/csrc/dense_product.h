// Multiplies with dense weights: bfloat16, float16 or float32 numbers of a checkpoint, in panels (layout.h).
//
// Products are exact and accumulators are float32. Sums run over the columns in ascending order, whatever the number of
// rows or threads, so results are the same for every batch. Activations are multiplied as float32; with bfloat16
// weights they are rounded to bfloat16 first, as in torch. Dot products of bfloat16 pairs flush subnormal numbers to
// zero.
//
// Columns are processed in blocks: a block of a few panels stays in the first-level cache while all rows pass over it,
// and the next block is prefetched from memory meanwhile.
#pragma once

#include <type_traits>

#include "functions.h"
#include "linear.h"
#if defined(__AMX_BF16__)
#include "pairs_amx.h"
#endif

namespace paged {
namespace {

// Vectors of a panel in a block. With 96, four panels take 24 KiB of a first-level cache, and rows of 576 or 1536
// 16-bit columns are whole blocks. 64 took 2 % longer on SmolLM2-135M's prefill on Zen 5, because tiles begin and end
// more often.
constexpr int kDenseBlock = 96;

// Each format defines the columns of one vector of a panel, the element type of activations, and their product. Where
// an instruction multiplies only one column, a vector of two columns is processed in two parts.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct DenseBfloat16 {
  static constexpr int kCols = 2, kParts = 1;
  using Element = uint16_t;
  using Vector = Pairs;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_pairs(reinterpret_cast<const uint32_t*>(p));
  }
  template <int kPart>
  static Vector same(const Element* x) {
    uint32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return broadcast_pair(pair);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return dot_pairs(w, x, sum); }
  static void store(Element* to, Floats x) { store_pairs(to, x); }
};
#else
struct DenseBfloat16 {
  static constexpr int kCols = 2, kParts = 2;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return kPart == 0 ? load_even_bfloat16(p) : load_odd_bfloat16(p);
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(x[kPart]);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) {
    alignas(64) uint16_t rounded[16];
    store_bfloat16(rounded, x);
    store_floats(to, load_bfloat16(rounded));
  }
};
#endif

struct DenseFloat16 {
  static constexpr int kCols = 2, kParts = 2;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_half(p + kPart * kHalves);
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(x[kPart]);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) { store_floats(to, x); }
};

struct DenseFloat32 {
  static constexpr int kCols = 1, kParts = 1;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_floats(reinterpret_cast<const float*>(p));
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(*x);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) { store_floats(to, x); }
};

// Calls take(Dense{}) for a dense format.
template <class Take>
inline auto with_dense(int32_t format, const Take& take) {
  switch (format) {
    case PAGED_DENSE_BFLOAT16:
      return take(DenseBfloat16{});
    case PAGED_DENSE_FLOAT16:
      return take(DenseFloat16{});
    default:
      return take(DenseFloat32{});
  }
}

// Activations by blocks of columns: [blocks][rows][columns of the block].
struct DenseRows {
  uint8_t* data;
  int num_rows;
  int vectors;  // vectors of a panel

  static size_t bytes(int num_rows, int cols) {
    return line_aligned(sizeof(float) * num_rows * (static_cast<size_t>(cols) + 1));
  }
  // Returns the number of vectors of the block that begins at `first`.
  int width(int first) const { return vectors - first < kDenseBlock ? vectors - first : kDenseBlock; }

  template <class Dense>
  typename Dense::Element* at(int first, int64_t row) const {
    const int64_t vector = static_cast<int64_t>(first) * num_rows + row * width(first);
    return reinterpret_cast<typename Dense::Element*>(data) + vector * Dense::kCols;
  }
  // Writes 16 columns of a row from `col` on, a multiple of 16, or as many as the row still has.
  template <class Dense>
  void store(int64_t row, int64_t col, Floats columns) const {
    const int vector = static_cast<int>(col / Dense::kCols), first = vector / kDenseBlock * kDenseBlock;
    typename Dense::Element* to = at<Dense>(first, row) + (vector - first) * Dense::kCols;
    const int left = (vectors - vector) * Dense::kCols;
    if (left >= 16) {
      Dense::store(to, columns);
    } else {
      typename Dense::Element last[16];
      Dense::store(last, columns);
      __builtin_memcpy(to, last, sizeof(last[0]) * left);
    }
  }
};
static_assert(kDenseBlock % 16 == 0, "16 columns lie in one block");

// Writes row `row` of x, times 1 / rms and norm_weight if given, to row `place` of out.
template <class Dense>
inline void prepare_dense_row(const Matrix& x, int64_t row, int cols, const float* norm_weight, float eps,
                              const DenseRows& out, int64_t place) {
  using Element = typename Dense::Element;
  const Floats factor = broadcast(norm_weight != nullptr ? inverse_rms(x, row, cols, eps) : 1.0f);
  for (int first = 0; first < out.vectors; first += kDenseBlock) {
    Element* to = out.at<Dense>(first, place);
    const int begin = first * Dense::kCols, count = out.width(first) * Dense::kCols;
    for (int c = 0; c < count; c += 16) {
      const int here = cols - begin - c;
      Floats v = here >= 16 ? x.load(row, begin + c) : x.load_first(row, begin + c, here);
      if (norm_weight != nullptr) {
        const float* weight = norm_weight + begin + c;
        v = mul(mul(v, factor), here >= 16 ? load_floats(weight) : load_first(weight, here));
      }
      if (count - c >= 16) {
        Dense::store(to + c, v);
      } else {
        Element last[16];
        Dense::store(last, v);
        __builtin_memcpy(to + c, last, sizeof(Element) * (count - c));
      }
    }
  }
}

// Writes rows [first, last) of x, times 1 / rms and norm_weight if given, to `out`.
inline void prepare_dense_rows(const paged_weight& weight, const Matrix& x, const float* norm_weight, float eps,
                               const DenseRows& out, int64_t first, int64_t last) {
  with_dense(weight.format, [&](auto of) {
    for (int64_t row = first; row < last; ++row)
      prepare_dense_row<decltype(of)>(x, row, weight.cols, norm_weight, eps, out, row);
  });
}

// Prefetches of a tile of rows: per vector, one cache line of each panel's next block, or a fraction of a line.
template <int kWide>
struct DenseAhead {
  const uint8_t* next[kWide];
  int step;
};

// The cache level that a tile prefetches into. A lone tile is done with a line as soon as it has multiplied it. Several
// tiles reread theirs, and two blocks of four panels, 48 KiB, exceed the first level, so the next block waits in the
// second.
enum class Fetch { kNothing, kToFirstLevel, kToSecondLevel };

template <Fetch kFetch>
inline void fetch_line(const uint8_t* line) {
  if constexpr (kFetch == Fetch::kToFirstLevel) __builtin_prefetch(line, 0, 3);
  if constexpr (kFetch == Fetch::kToSecondLevel) __builtin_prefetch(line, 0, 2);
}

// Calls take(integral_constant<part>) for each part of a vector.
template <int kParts, class Take>
inline void each_part(const Take& take) {
  take(std::integral_constant<int, 0>{});
  if constexpr (kParts == 2) take(std::integral_constant<int, 1>{});
}

// Register tile: sums[v][r] (+)= panel v . row r of x, for `vectors` vectors of kWide panels and kRows rows; `pitch` is
// the distance between two panels' sums.
template <class Dense, int kRows, int kWide, Fetch kFetch>
inline void multiply_dense_tile(const uint8_t* const (&panels)[kWide], const DenseAhead<kWide>& ahead,
                                const typename Dense::Element* x, int vectors, float (*sums)[kPanelRows],
                                int64_t pitch, bool accumulate) {
  const int64_t stride = static_cast<int64_t>(vectors) * Dense::kCols;
  // GCC 12 keeps the accumulators in registers throughout only if every loop over them is unrolled. Otherwise it copied
  // all of them to memory and back before and after the columns, which took 2 to 4 % of a product with many rows.
  Floats sum[kRows][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sum[r][v] = accumulate ? load_floats(sums[v * pitch + r]) : zero_floats();
  for (int64_t i = 0; i < vectors; ++i) {
    for (int v = 0; v < kWide; ++v) fetch_line<kFetch>(ahead.next[v] + i * ahead.step);
    // One part for all rows, then the other: the weights of both parts would take registers from the accumulators.
    each_part<Dense::kParts>([&](auto part) {
      constexpr int kPart = decltype(part)::value;
      typename Dense::Vector w[kWide];
      for (int v = 0; v < kWide; ++v) w[v] = Dense::template load<kPart>(panels[v] + i * kVector);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename Dense::Vector same = Dense::template same<kPart>(x + r * stride + i * Dense::kCols);
        for (int v = 0; v < kWide; ++v) sum[r][v] = Dense::multiply_add(w[v], same, sum[r][v]);
      }
    });
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) store_floats(sums[v * pitch + r], sum[r][v]);
}

// The same, not inlined. Inlined into a loop over panels, GCC 12 spilled accumulators of AVX2's tile: 76 GFLOP/s per
// core instead of 110. The larger tiles of AVX-512 lose up to 8 % by a call.
template <class Dense, int kRows, int kWide, Fetch kFetch>
[[gnu::noinline]] void call_dense_tile(const uint8_t* const (&panels)[kWide], const DenseAhead<kWide>& ahead,
                                       const typename Dense::Element* x, int vectors, float (*sums)[kPanelRows],
                                       int64_t pitch, bool accumulate) {
  multiply_dense_tile<Dense, kRows, kWide, kFetch>(panels, ahead, x, vectors, sums, pitch, accumulate);
}

// Rows of a tile of kWide panels: as many as fit the registers, at most twice as many as with the most panels.
template <int kWide>
constexpr int kTallest = kWide < kDensePanels ? 2 * kDenseRows : kDenseRows * kDensePanels / kWide;

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

// Calls take(integral_constant<count>) for a count of rows up to kRows.
template <int kRows, class Take>
inline void with_dense_rows(int count, const Take& take) {
  if (count == kRows) {
    take(std::integral_constant<int, kRows>{});
  } else if constexpr (kRows > 1) {
    with_dense_rows<kRows - 1>(count, take);
  }
}

// sums[v][r] = panel v . row r of x, for kGroup panels and all rows, in tiles of kWide panels. `next` are the panels
// that are multiplied afterwards, which are prefetched.
template <class Dense, int kWide, int kGroup>
inline void multiply_dense_tiles(const uint8_t* const (&panels)[kGroup], const uint8_t* const (&next)[kGroup],
                                 const DenseRows& x, float (*sums)[kPanelRows]) {
  const int tiles = (x.num_rows + kTallest<kWide> - 1) / kTallest<kWide>;
  // Up to four tiles share the prefetches, so that memory is never idle. With 16 rows, i.e. three tiles, prefetching in
  // two of them read 21 to 22 GB/s, in all three 24, on a Zen 4 that multiplies as fast.
  const int shares = tiles < 4 ? tiles : 4, step = (kVector + shares - 1) / shares;
  for (int first = 0; first < x.vectors; first += kDenseBlock) {
    const int width = x.width(first);
    for (int begin = 0; begin < kGroup; begin += kWide) {
      const uint8_t* here[kWide];
      DenseAhead<kWide> ahead;
      for (int v = 0; v < kWide; ++v) {
        here[v] = panels[begin + v] + static_cast<int64_t>(first) * kVector;
        ahead.next[v] = first + kDenseBlock < x.vectors ? here[v] + kDenseBlock * kVector : next[begin + v];
      }
      float(*to)[kPanelRows] = sums + static_cast<int64_t>(begin) * x.num_rows;
      for (int t = 0; t < tiles; ++t) {
        // Tiles of nearly equal height: the few accumulators of a low tile would wait for each other.
        const int row = static_cast<int>(static_cast<int64_t>(x.num_rows) * t / tiles);
        const int end = static_cast<int>(static_cast<int64_t>(x.num_rows) * (t + 1) / tiles);
        ahead.step = t < shares ? step : 0;
        with_dense_rows<kTallest<kWide>>(end - row, [&](auto rows) {
          const auto multiply = [&](auto fetch) {
            constexpr int kRows = decltype(rows)::value;
            constexpr Fetch kFetch = decltype(fetch)::value;
            constexpr auto tile = kWide < kGroup ? call_dense_tile<Dense, kRows, kWide, kFetch>
                                                 : multiply_dense_tile<Dense, kRows, kWide, kFetch>;
            tile(here, ahead, x.at<Dense>(first, row), width, to + row, x.num_rows, first > 0);
          };
          if (ahead.step == 0) {  // without prefetches, the tile needs no registers for them
            multiply(std::integral_constant<Fetch, Fetch::kNothing>{});
          } else if (tiles == 1) {
            multiply(std::integral_constant<Fetch, Fetch::kToFirstLevel>{});
          } else {
            multiply(std::integral_constant<Fetch, Fetch::kToSecondLevel>{});
          }
        });
        for (int v = 0; v < kWide; ++v) ahead.next[v] += ahead.step * width;
      }
    }
  }
}

#if defined(__AMX_BF16__)
// sums[v][row ...] (+)= panel v . rows of x from `row` on, up to 32, over the vectors [first, last) of kWide panels, a
// range of whole blocks.
template <int kTiles, int kWide>
inline void multiply_pair_square(MatrixUnit& unit, const uint8_t* const* panels, const DenseRows& x, int row, int first,
                                 int last, float (*sums)[kPanelRows]) {
  const int left = x.num_rows - row, count = left < kTiles * kAmxRows ? left : kTiles * kAmxRows;
  PairSquare<kTiles, kWide> square;
  for (int v = 0; v < kWide; ++v) {
    square.columns[v] = {reinterpret_cast<const uint32_t*>(panels[v]), kPanelRows};
    square.sums[v] = {sums[static_cast<int64_t>(v) * x.num_rows + row], kPanelRows};
  }
  square.shape(unit, count, kAmxPairs);
  square.begin(first > 0);
  int vector = first;
  for (int block = first; block < last; block += kDenseBlock) {
    const int width = x.width(block);
    square.rows = {reinterpret_cast<const uint32_t*>(x.at<DenseBfloat16>(block, row)), width};
    for (; vector + kAmxPairs <= block + width; vector += kAmxPairs) square.add(vector - block, vector);
  }
  square.end();
  if (vector == last) return;
  square.shape(unit, count, last - vector);
  square.begin(true);
  square.add(vector % kDenseBlock, vector);
  square.end();
}

// sums[v][r] (+)= panel v . row r of x over the block at `first`, for kWide panels and more than 32 rows. Prefetches
// `next`, the panels' blocks that are multiplied afterwards.
template <int kWide>
inline void multiply_pair_block(MatrixUnit& unit, const uint8_t* const* panels, const uint8_t* const (&next)[kWide],
                                const DenseRows& x, int first, float (*sums)[kPanelRows]) {
  const int width = x.width(first), squares = width % kAmxPairs == 0 ? x.num_rows / (2 * kAmxRows) : 0;
  const uint32_t* columns[kWide];
  float* to[kWide];
  for (int v = 0; v < kWide; ++v) {
    columns[v] = reinterpret_cast<const uint32_t*>(panels[v] + static_cast<int64_t>(first) * kVector);
    to[v] = sums[static_cast<int64_t>(v) * x.num_rows];
  }
  // No prefetch for one or two squares, which are bound by memory anyway: 48 rows took 10 % longer with it, 512 take 5
  // to 20 % less.
  int fetched = squares < 3 ? kDenseBlock : 0;
  const auto fetch = [&](int square) {
    for (const int last = kDenseBlock * (square + 1) / squares; fetched < last; ++fetched)
      for (const uint8_t* panel : next) __builtin_prefetch(panel + fetched * kVector, 0, 2);
  };
  const auto* rows = reinterpret_cast<const uint32_t*>(x.at<DenseBfloat16>(first, 0));
  unit.shape(kAmxRows, kAmxRows, kAmxPairs);
  const auto multiply = first > 0 ? multiply_squares<2, kWide, true, kVector, decltype(fetch)>
                                  : multiply_squares<2, kWide, false, kVector, decltype(fetch)>;
  multiply(rows, width, columns, width, kAmxPairs, squares, to, fetch);
  for (int row = squares * 2 * kAmxRows; row < x.num_rows; row += 2 * kAmxRows) {
    const auto rest = x.num_rows - row > kAmxRows ? multiply_pair_square<2, kWide> : multiply_pair_square<1, kWide>;
    rest(unit, panels, x, row, first, first + width, sums);
  }
}

// The same with AMX and bfloat16 weights, two panels at a time. The sums of few rows stay in tiles from the first
// column to the last, and the hardware prefetcher is as fast as software prefetch; the sums of many rows are reloaded
// for each block.
template <int kGroup>
inline void multiply_pair_panels(const uint8_t* const (&panels)[kGroup], const uint8_t* const (&next)[kGroup],
                                 const DenseRows& x, float (*sums)[kPanelRows]) {
  constexpr int kWide = kGroup < 2 ? 1 : 2;
  MatrixUnit unit;
  compiler_barrier();
  const auto sums_of = [&](int panel) { return sums + static_cast<int64_t>(panel) * x.num_rows; };
  if (x.num_rows <= 2 * kAmxRows) {
    const auto multiply = x.num_rows > kAmxRows ? multiply_pair_square<2, kWide> : multiply_pair_square<1, kWide>;
    for (int p = 0; p < kGroup; p += kWide) multiply(unit, panels + p, x, 0, 0, x.vectors, sums_of(p));
    return;
  }
  for (int first = 0; first < x.vectors; first += kDenseBlock) {
    const int64_t then = first + kDenseBlock;
    for (int p = 0; p < kGroup; p += kWide) {
      const uint8_t* ahead[kWide];
      for (int v = 0; v < kWide; ++v) ahead[v] = then < x.vectors ? panels[p + v] + then * kVector : next[p + v];
      multiply_pair_block<kWide>(unit, panels + p, ahead, x, first, sums_of(p));
    }
  }
}
#endif

// The same, with the number of panels per tile chosen by the rows: all of the group's while one tile holds all rows.
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
