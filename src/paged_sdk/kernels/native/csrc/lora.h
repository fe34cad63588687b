// Adds LoRA updates to a layer's products, with a possibly different adapter per row (Hu et al., 2021, arXiv
// 2106.09685). Rows of one adapter are multiplied together, first by `down`, and the few results by `up`.
#pragma once

#include <algorithm>

#include "linear.h"
#include "pool.h"

namespace paged {
namespace {

constexpr int kRankTile = 4;      // ranks that share one read of the input
constexpr int kUpdatedRows = 4;   // rows that share one read of the weights
constexpr int kUpdatePanels = 8;  // panels of 16 outputs per item

// A step's rows that have an adapter, sorted by adapter. A row's place is its index in this order.
struct AdaptedRows {
  const paged_update* const* adapters = nullptr;
  const int32_t* rows = nullptr;    // by place; adapter a's are starts[a] ... starts[a + 1] - 1
  const int32_t* starts = nullptr;
  int num_adapters = 0;

  int count() const { return num_adapters == 0 ? 0 : starts[num_adapters]; }
  const paged_update& update(int adapter, int layer, int projection) const {
    return adapters[adapter][layer * PAGED_PROJECTIONS + projection];
  }
  // Whether an adapter of these rows updates one of `count` projections.
  bool change(int layer, int first, int count) const {
    for (int a = 0; a < num_adapters; ++a)
      for (int p = first; p < first + count; ++p)
        if (starts[a] < starts[a + 1] && update(a, layer, p).down != nullptr) return true;
    return false;
  }
  // Numbers in the memory of sorted rows.
  static size_t numbers(const paged_decoder_args& args) {
    return static_cast<size_t>(args.num_rows) + args.num_adapters + 1;
  }
  // Sorts num_rows rows by their adapters, given in of_row, into `memory`.
  static AdaptedRows sorted(const paged_decoder_args& args, const int32_t* of_row, int num_rows, int32_t* memory) {
    int32_t *starts = memory, *rows = memory + args.num_adapters + 1;
    int32_t place = 0;
    for (int a = 0; a < args.num_adapters; ++a) {
      starts[a] = place;
      for (int32_t row = 0; row < num_rows; ++row)
        if (of_row[row] == a) rows[place++] = row;
    }
    starts[args.num_adapters] = place;
    return {args.adapters, rows, starts, args.num_adapters};
  }
};

// Scratch memory of a step with adapters.
struct AdapterScratch {
  int32_t* sorted;       // AdaptedRows of all rows
  int32_t* sorted_read;  // AdaptedRows of the rows that are read; their adapters are in of_read
  int32_t* of_read;
  float* normed;   // [rows, hidden]: by place
  float* shrunk;   // [rows, ranks of the widest products]: by place
  float* gate_up;  // [rows, 2 * inner]
  float* product;  // [rows, hidden]: a product that is updated before it is added to the residual stream

  static AdapterScratch at(Arena& arena, const paged_decoder_args& args) {
    if (args.num_adapters == 0) return {};
    int inner = 0, ranks = 0;
    for (int i = 0; i < args.num_layers; ++i) {
      const paged_layer& layer = args.layers[i];
      if (layer.up.rows > inner) inner = layer.up.rows;
      for (int a = 0; a < args.num_adapters; ++a) {
        int all = 0;
        for (int p = 0; p < PAGED_PROJECTIONS; ++p) all += args.adapters[a][i * PAGED_PROJECTIONS + p].rank;
        ranks = all > ranks ? all : ranks;
      }
    }
    const int64_t rows = args.num_rows, hidden = args.hidden_size;
    AdapterScratch out{};
    out.sorted = arena.take<int32_t>(AdaptedRows::numbers(args));
    out.sorted_read = arena.take<int32_t>(AdaptedRows::numbers(args));
    out.of_read = arena.take<int32_t>(rows);
    out.normed = arena.take<float>(rows * hidden);
    out.shrunk = arena.take<float>(rows * ranks);
    out.gate_up = arena.take<float>(rows * 2 * inner);
    out.product = arena.take<float>(rows * hidden);
    return out;
  }
};

// Loads 16 numbers of an adapter's matrix, by dtype.
struct FloatNumbers {
  static constexpr int kBytes = 4;
  static Floats load(const uint8_t* p) { return load_floats(reinterpret_cast<const float*>(p)); }
};
struct BfloatNumbers {
  static constexpr int kBytes = 2;
  static Floats load(const uint8_t* p) { return load_bfloat16(reinterpret_cast<const uint16_t*>(p)); }
};
struct HalfNumbers {
  static constexpr int kBytes = 2;
  static Floats load(const uint8_t* p) { return load_half(p); }
};

// Prefetches two kilobytes ahead. Matrices are stored in the order of their use, so the end of one prefetches the
// beginning of the next. Eight adapters of Qwen2.5-1.5B are 295 MB: one thread of a Zen 4 multiplies them in 14.5 ms,
// compared with 22.8 ms without prefetch, in small pages and with ranks stored row by row.
template <int kBytes>
inline void fetch_ahead(const uint8_t* p) {
#pragma GCC unroll 4
  for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(p + line + 2048);
}

template <class Body>
inline void with_numbers(int32_t dtype, const Body& body) {
  if (dtype == PAGED_FLOAT32) return body(FloatNumbers{});
  if (dtype == PAGED_BFLOAT16) return body(BfloatNumbers{});
  body(HalfNumbers{});
}

// out[k][r] = down[rank + r] . x[k] for kRows rows; the order of a sum does not depend on kRows.
template <int kRows, class Numbers>
inline void shrink(const paged_update& update, int rank, const float* const* x, int cols, float* out, int64_t stride) {
  constexpr int kVector = 16 * Numbers::kBytes;
  const uint8_t* w = static_cast<const uint8_t*>(update.down) + static_cast<int64_t>(rank) * cols * Numbers::kBytes;
  Floats sums[kRows][kRankTile];
  for (int k = 0; k < kRows; ++k)
    for (int r = 0; r < kRankTile; ++r) sums[k][r] = zero_floats();
  for (int c = 0; c < cols; c += 16, w += kRankTile * kVector) {
    fetch_ahead<kRankTile * kVector>(w);
    Floats inputs[kRows];
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) inputs[k] = load_floats(x[k] + c);
#pragma GCC unroll 4
    for (int r = 0; r < kRankTile; ++r) {
      const Floats ranks = Numbers::load(w + r * kVector);
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k) sums[k][r] = fma(ranks, inputs[k], sums[k][r]);
    }
  }
  for (int k = 0; k < kRows; ++k)
    for (int r = 0; r < kRankTile; ++r) out[k * stride + rank + r] = sum_of(sums[k][r]);
}

// out[k][0 ... 15] = out[k] * gains + up[panel] . shrunk[k] for kRows rows; the order of a sum does not depend on
// kRows.
template <int kRows, class Numbers>
inline void expand(const paged_update& update, int panel, const float* shrunk, int64_t stride, float* const* out) {
  constexpr int kVector = 16 * Numbers::kBytes;
  const uint8_t* w = static_cast<const uint8_t*>(update.up) + static_cast<int64_t>(panel) * update.rank * kVector;
  Floats sums[kRows];
#pragma GCC unroll 4
  for (int k = 0; k < kRows; ++k) sums[k] = load_floats(out[k]);
  if (update.gains != nullptr) {
    const Floats factors = load_floats(update.gains + panel * 16);
    const Floats terms = load_floats(update.gains + (num_panels(update.rows) + panel) * 16);
    for (int k = 0; k < kRows; ++k) sums[k] = fma(sums[k], factors, terms);
  }
  for (int rank = 0; rank < update.rank; rank += kRankTile, w += kRankTile * kVector) {
    fetch_ahead<kRankTile * kVector>(w);
#pragma GCC unroll 4
    for (int r = 0; r < kRankTile; ++r) {
      const Floats outputs = Numbers::load(w + r * kVector);
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k)
        sums[k] = fma(broadcast(shrunk[k * stride + rank + r]), outputs, sums[k]);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kRows; ++k) store_floats(out[k], sums[k]);
}

// Calls body(count, first) for runs of up to kUpdatedRows places; count is an integral_constant.
template <class Body>
inline void by_row_tiles(int first, int last, const Body& body) {
  for (; first + kUpdatedRows <= last; first += kUpdatedRows)
    body(std::integral_constant<int, kUpdatedRows>{}, first);
  if (last - first == 3) return body(std::integral_constant<int, 3>{}, first);
  if (last - first == 2) return body(std::integral_constant<int, 2>{}, first);
  if (last - first == 1) body(std::integral_constant<int, 1>{}, first);
}

// The input of an update: rows of a matrix, indexed by place if they were normalized into a buffer of their own.
struct UpdateInput {
  const float* data;
  int64_t stride;
  int cols;
  bool by_place = false;

  const float* at(const AdaptedRows& adapted, int place) const {
    return data + (by_place ? place : adapted.rows[place]) * stride;
  }
};

// Normalizes the rows that have an adapter, or copies them if there is no norm.
inline auto normalize_adapted(Job& job, const AdaptedRows& adapted, const paged_decoder_args& args,
                              const paged_layer& layer, const float* norm, const float* bias, float* normed) {
  const int hidden = args.hidden_size;
  return job.phase(adapted.count(), row_cost(hidden),
                   [&adapted, &args, &layer, hidden, norm, bias, normed](int64_t first, int64_t last, int) {
                     for (int64_t place = first; place < last; ++place) {
                       const float* from = args.hidden + static_cast<int64_t>(adapted.rows[place]) * hidden;
                       normalize_into(layer.norm, from, hidden, norm, bias, layer.norm_eps, normed + place * hidden);
                     }
                   });
}

// Adds each row's adapter updates to the outputs of projections first_projection ..., which are adjacent.
inline Task add_updates(Job& job, const AdaptedRows& adapted, int layer, int first_projection, int num_projections,
                        UpdateInput x, float* out, int64_t out_stride, float* shrunk) {
  // Items are sized for the largest adapter; items beyond a smaller one's rank or rows are skipped.
  int tiles = 0, blocks = 0, ranks = 0;
  for (int a = 0; a < adapted.num_adapters; ++a) {
    int all = 0;
    for (int p = 0; p < num_projections; ++p) {
      const paged_update& update = adapted.update(a, layer, first_projection + p);
      const auto own_blocks = static_cast<int>((num_panels(update.rows) + kUpdatePanels - 1) / kUpdatePanels);
      tiles = update.rank / kRankTile > tiles ? update.rank / kRankTile : tiles;
      blocks = own_blocks > blocks ? own_blocks : blocks;
      all += update.rank;
    }
    ranks = all > ranks ? all : ranks;
  }
  const int64_t num_pairs = static_cast<int64_t>(adapted.num_adapters) * num_projections;
  const int64_t rows = adapted.count() / adapted.num_adapters + 1;
  // Offset of a projection's ranks in a row of `shrunk`.
  const auto offset = [&](int adapter, int projection) {
    int before = 0;
    for (int p = 0; p < projection; ++p) before += adapted.update(adapter, layer, first_projection + p).rank;
    return before;
  };
  // A float32 product costs as much as eight byte products.
  co_await job.phase(num_pairs * tiles, 8 * kRankTile * rows * x.cols, [&](int64_t first, int64_t last, int) {
    for (int64_t item = first; item < last; ++item) {
      const int pair = static_cast<int>(item / tiles), rank = static_cast<int>(item % tiles) * kRankTile;
      const int a = pair / num_projections, p = pair % num_projections;
      const paged_update& update = adapted.update(a, layer, first_projection + p);
      if (rank >= update.rank) continue;
      float* const to = shrunk + offset(a, p);
      with_numbers(update.dtype, [&](auto numbers) {
        by_row_tiles(adapted.starts[a], adapted.starts[a + 1], [&](auto count, int place) {
          const float* inputs[count.value];
          for (int k = 0; k < count.value; ++k) inputs[k] = x.at(adapted, place + k);
          shrink<count.value, decltype(numbers)>(update, rank, inputs, x.cols, to + static_cast<int64_t>(place) * ranks,
                                                 ranks);
        });
      });
    }
  });
  co_await job.phase(num_pairs * blocks, 8 * 16 * kUpdatePanels * rows * (ranks / num_projections + 1),
                     [&](int64_t first, int64_t last, int) {
    for (int64_t item = first; item < last; ++item) {
      const int pair = static_cast<int>(item / blocks), block = static_cast<int>(item % blocks) * kUpdatePanels;
      const int a = pair / num_projections, p = pair % num_projections;
      const paged_update& update = adapted.update(a, layer, first_projection + p);
      const auto panels = static_cast<int>(num_panels(update.rows));
      const int end = block + kUpdatePanels < panels ? block + kUpdatePanels : panels;
      const float* const from = shrunk + offset(a, p);
      with_numbers(update.dtype, [&](auto numbers) {
        for (int panel = block; panel < end; ++panel) {
          const int left = update.rows - panel * 16;
          by_row_tiles(adapted.starts[a], adapted.starts[a + 1], [&](auto count, int place) {
            alignas(64) float whole[count.value][16];  // of a last panel with fewer columns
            float *outputs[count.value], *own[count.value];
            for (int k = 0; k < count.value; ++k) {
              own[k] = outputs[k] = out + adapted.rows[place + k] * out_stride + update.first + panel * 16;
              if (left >= 16) continue;
              outputs[k] = whole[k];
              std::copy_n(own[k], left, whole[k]);
              std::fill(whole[k] + left, whole[k] + 16, 0.0f);
            }
            expand<count.value, decltype(numbers)>(update, panel, from + static_cast<int64_t>(place) * ranks, ranks,
                                                   outputs);
            for (int k = 0; k < count.value && left < 16; ++k) std::copy_n(whole[k], left, own[k]);
          });
        }
      });
    }
  });
}

// out = product + residual; cols is a multiple of 16.
inline auto add_product(Job& job, const float* product, const Output out, int64_t num_rows, int cols) {
  return job.phase(num_rows, row_cost(cols), [product, out, cols](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      for (int c = 0; c < cols; c += 16) out.store(row, c, 16, load_floats(product + row * cols + c), nullptr);
  });
}

// gate = activation(gate) * up in place, for rows [gate, up]; without a gate, up = activation(up).
inline auto activate_rows(Job& job, float* gate_up, int inner, bool has_gate, const paged_layer& layer, int num_rows) {
  return job.phase(num_rows, 4 * row_cost(inner), [=, &layer](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      float* gate = gate_up + row * (has_gate ? 2 : 1) * inner;
      for (int c = 0; c < inner; c += 16) {
        const Floats x = load_floats(gate + c);
        const Floats activated = layer.xielu != nullptr ? xielu(x, layer.xielu) : activate(x, layer.activation);
        store_floats(gate + c, has_gate ? mul(activated, load_floats(gate + inner + c)) : activated);
      }
    }
  });
}

}  // namespace
}  // namespace paged
