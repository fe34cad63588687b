// Computes mixtures of experts on packed weights: for each token, the weighted sum of a few of many MLPs, with gates or
// without.
//
// A token and one of its selected experts are a pair. Pairs are sorted by expert, so that an expert's weights are read
// once for all its tokens. Two main phases follow: all experts' gate and up products, or up's alone, then all experts'
// down products. In tensor parallelism, each rank has some neurons of every expert, and the ranks gather the inner
// activations in between.
#pragma once

#include <algorithm>

#include "product.h"

namespace paged {
namespace {

// Pairs of one expert that are multiplied together, in token order.
struct Segment {
  int32_t expert;
  int32_t first;  // index into the sorted pairs
  int32_t count;
};

// An expert with more pairs has several segments and reads its weights again for each: 64 rows of 2,048 columns fit the
// second-level cache.
constexpr int kSegmentRows = 64;

// Panels that are multiplied together: their 32 inner columns are one activation group for down.
constexpr int kUnitPanels = kGroup / kPanelRows;

// Bytes of a thread's sums of four panels of a segment.
constexpr size_t kSegmentSums = 2 * kUnitPanels * sums_bytes(kSegmentRows);
static_assert(kSegmentSums == line_aligned(kSegmentSums));

struct ExpertsScratch {
  int32_t* places;    // [num_experts]
  int32_t* pairs;     // [num_pairs], sorted by expert: token * num_selected + index of the selection
  Segment* segments;  // terminated by an empty segment
  uint8_t* input;     // activations of every pair's token
  uint8_t* gated;     // activations of every pair's inner layer
  float* own;         // [num_pairs, inner] of this rank, if inner activations are gathered
  float* joined;      // the same, gathered from all ranks
  float* totals;      // [num_tokens, hidden]
  uint8_t* sums;      // kSegmentSums per thread

  static ExpertsScratch at(Arena& arena, const paged_experts_args& args, int num_threads) {
    const int64_t num_pairs = static_cast<int64_t>(args.num_tokens) * args.num_selected;
    const int64_t used = std::min<int64_t>(num_pairs, args.num_experts);
    const auto rows_bytes = [&](const paged_weight& weight) {
      return is_dense(weight.format) ? DenseRows::bytes(num_pairs, weight.cols)
                                     : Activations::bytes(num_pairs, weight.cols);
    };
    const bool joins = args.inner_widths != nullptr;
    ExpertsScratch out{};
    out.places = arena.take<int32_t>(args.num_experts);
    out.pairs = arena.take<int32_t>(num_pairs);
    out.segments = arena.take<Segment>(used + num_pairs / kSegmentRows + 1);
    out.input = arena.take<uint8_t>(rows_bytes(args.up));
    out.gated = arena.take<uint8_t>(rows_bytes(args.down));
    out.own = arena.take<float>(joins ? num_pairs * (args.up.rows / args.num_experts) : 0);
    out.joined = arena.take<float>(joins ? num_pairs * args.down.cols : 0);
    out.totals = arena.take<float>(static_cast<int64_t>(args.num_tokens) * (args.down.rows / args.num_experts));
    out.sums = arena.take<uint8_t>(kSegmentSums * num_threads);
    return out;
  }
  static size_t bytes(const paged_experts_args& args, int num_threads) {
    Arena arena(nullptr);
    at(arena, args, num_threads);
    return arena.used();
  }
};

inline bool all_exist(const paged_experts_args& args) {
  const int64_t num_pairs = static_cast<int64_t>(args.num_tokens) * args.num_selected;
  for (int64_t pair = 0; pair < num_pairs; ++pair)
    if (args.topk_ids[pair] < 0 || args.topk_ids[pair] >= args.num_experts) return false;
  return true;
}

// Sorts pairs by expert and cuts them into segments.
inline void sort_pairs(const paged_experts_args& args, const ExpertsScratch& scratch) {
  const int num_pairs = args.num_tokens * args.num_selected;
  int32_t* places = scratch.places;
  __builtin_memset(places, 0, sizeof(int32_t) * args.num_experts);
  for (int pair = 0; pair < num_pairs; ++pair) ++places[args.topk_ids[pair]];
  Segment* segment = scratch.segments;
  int first = 0;
  for (int expert = 0; expert < args.num_experts; ++expert) {
    const int end = first + places[expert];
    places[expert] = first;
    for (; first < end; first += segment++->count)
      *segment = {expert, first, end - first < kSegmentRows ? end - first : kSegmentRows};
  }
  *segment = {};
  for (int pair = 0; pair < num_pairs; ++pair) scratch.pairs[places[args.topk_ids[pair]]++] = pair;
}

// One projection of all experts.
struct Stack {
  const paged_weight& weight;
  int64_t panel_bytes;
  int64_t panels;  // of one expert

  Stack(const paged_weight& weight, int num_experts)
      : weight(weight),
        panel_bytes(is_dense(weight.format) ? dense_panel_bytes(weight.format, weight.cols)
                                            : panel_kernel(weight).panel_bytes),
        panels(num_panels(weight.rows) / num_experts) {}

  bool is_there() const { return weight.data != nullptr; }  // experts may have no gates
  int64_t units() const { return panels / kUnitPanels; }
  int64_t rows() const { return panels * kPanelRows; }  // of one expert
  const uint8_t* unit_of(const Segment& segment, int64_t unit) const {
    return weight.data + (segment.expert * panels + unit * kUnitPanels) * panel_bytes;
  }
};

// How rows of pairs are stored and multiplied for weights in blocks ...
struct GroupRows {
  using Rows = Activations;

  static Rows of_segment(uint8_t* memory, const Segment& segment, const paged_weight& weight) {
    return {reinterpret_cast<ActivationGroup*>(memory + Activations::bytes(segment.first, weight.cols)),
            segment.count};
  }
  static void prepare(const Matrix& x, int64_t token, const paged_weight& weight, const Rows& out, int64_t place) {
    quantize_row(x, token, weight.cols, nullptr, 0.0f, out, place);
  }
  // Stores the two vectors of columns of a unit.
  static void store(const Rows& out, int64_t unit, int64_t row, const Floats (&columns)[kUnitPanels]) {
    ActivationGroup& group = *out.at(unit, row);
    float scaled[kUnitPanels];
    for (int p = 0; p < kUnitPanels; ++p) scaled[p] = quantize_half(columns[p], group, p);
    group.scaled_sum = scaled[0] + scaled[1];
  }
  // sums[p][r] = panel p of the unit . row r of x.
  static void multiply(const Stack& stack, const Segment& segment, int64_t unit, const Rows& x,
                       float (*sums)[kPanelRows]) {
    const PanelKernel kernel = panel_kernel(stack.weight);
    const uint8_t* panel = stack.unit_of(segment, unit);
    for (int p = 0; p < kUnitPanels; ++p)
      kernel.multiply(panel + p * stack.panel_bytes, stack.weight, x, sums + p * segment.count);
  }
};

// ... and for dense weights.
template <class Dense>
struct DenseUnitRows {
  using Rows = DenseRows;

  static Rows of_segment(uint8_t* memory, const Segment& segment, const paged_weight& weight) {
    const int vectors = dense_vectors(weight.format, weight.cols);
    const int64_t row = static_cast<int64_t>(vectors) * Dense::kCols * sizeof(typename Dense::Element);
    return {memory + segment.first * row, segment.count, vectors};
  }
  static void prepare(const Matrix& x, int64_t token, const paged_weight& weight, const Rows& out, int64_t place) {
    prepare_dense_row<Dense>(x, token, weight.cols, nullptr, 0.0f, out, place);
  }
  static void store(const Rows& out, int64_t unit, int64_t row, const Floats (&columns)[kUnitPanels]) {
    for (int p = 0; p < kUnitPanels; ++p) out.store<Dense>(row, (unit * kUnitPanels + p) * kPanelRows, columns[p]);
  }
  static void multiply(const Stack& stack, const Segment& segment, int64_t unit, const Rows& x,
                       float (*sums)[kPanelRows]) {
    const uint8_t *panel = stack.unit_of(segment, unit), *next = panel + kUnitPanels * stack.panel_bytes;
    multiply_dense_panels<Dense, kUnitPanels>({panel, panel + stack.panel_bytes}, {next, next + stack.panel_bytes}, x,
                                              sums);
  }
};

// Prepares the rows of pairs [first, last) for a weight, from row `row_of(pair)` of x.
template <class Kind, class RowOf>
inline void prepare_pairs(const Matrix& x, const RowOf& row_of, const Segment* segment, const paged_weight& weight,
                          uint8_t* memory, int64_t first, int64_t last) {
  for (; segment->count > 0; ++segment) {
    const auto rows = Kind::of_segment(memory, *segment, weight);
    for (int r = 0; r < segment->count; ++r) {
      const int pair = segment->first + r;
      if (pair >= first && pair < last) Kind::prepare(x, row_of(pair), weight, rows, r);
    }
  }
}

// Adds the bias of an expert's 16 columns, those of the unit's panel p.
inline Floats add_bias(Floats product, const Stack& stack, const Segment& segment, int64_t unit, int p) {
  if (stack.weight.bias == nullptr) return product;
  const int64_t panel = segment.expert * stack.panels + unit * kUnitPanels + p;
  return add(product, load_floats(stack.weight.bias + panel * kPanelRows));
}

// Computes gated_expert(gate x, up x), or activate(up x) without gates, for one unit's columns, and stores them as rows
// for down, or as float32 if they are to be gathered.
template <class Kind>
inline void inner_unit(const paged_experts_args& args, const Stack& gate, const Stack& up, const Segment& segment,
                       int64_t unit, const typename Kind::Rows& x, const typename Kind::Rows& out, float* own,
                       float (*sums)[kPanelRows]) {
  float (*up_sums)[kPanelRows] = sums + kUnitPanels * segment.count;
  if (gate.is_there()) Kind::multiply(gate, segment, unit, x, sums);
  Kind::multiply(up, segment, unit, x, up_sums);
  for (int r = 0; r < segment.count; ++r) {
    Floats columns[kUnitPanels];
    for (int p = 0; p < kUnitPanels; ++p) {
      const int at = p * segment.count + r;
      const Floats ups = add_bias(load_floats(up_sums[at]), up, segment, unit, p);
      columns[p] = gate.is_there() ? gated_expert(add_bias(load_floats(sums[at]), gate, segment, unit, p), ups,
                                                  args.activation, args.swiglu_alpha, args.swiglu_limit)
                                   : activate(ups, args.activation);
    }
    if (args.inner_widths == nullptr) {
      Kind::store(out, unit, r, columns);
    } else {
      float* const to = own + (segment.first + r) * up.rows() + unit * kUnitPanels * kPanelRows;
      for (int p = 0; p < kUnitPanels; ++p) store_floats(to + p * kPanelRows, columns[p]);
    }
  }
}

// Cost of one unit of a segment, in rows.
inline int64_t rows_paid(const Segment& segment) { return std::max<int64_t>(segment.count, kMemoryBoundRows); }

inline int64_t rows_paid(const ExpertsScratch& scratch) {
  int64_t total = 0;
  for (const Segment* segment = scratch.segments; segment->count > 0; ++segment) total += rows_paid(*segment);
  return total;
}

// Processes the units that begin in [first, last) of an index space in which a unit is as long as its cost. A thread's
// range is contiguous in each weight, so that the weights stream.
template <class Kind>
inline void inner_segments(const paged_experts_args& args, const Stack& gate, const Stack& up, const Stack& down,
                           const ExpertsScratch& scratch, float (*sums)[kPanelRows], int64_t first, int64_t last) {
  const int64_t units = up.units();
  int64_t before = 0;
  for (const Segment* next = scratch.segments; next->count > 0 && before < last; ++next) {
    const Segment& segment = *next;
    const int64_t cost = rows_paid(segment);
    // Returns the first unit that begins at `place` or later.
    const auto unit_at = [&](int64_t place) {
      const int64_t unit = place > before ? (place - before + cost - 1) / cost : 0;
      return unit < units ? unit : units;
    };
    const auto x = Kind::of_segment(scratch.input, segment, up.weight);
    const auto out = Kind::of_segment(scratch.gated, segment, down.weight);
    for (int64_t unit = unit_at(first), end = unit_at(last); unit < end; ++unit)
      inner_unit<Kind>(args, gate, up, segment, unit, x, out, scratch.own, sums);
    before += units * cost;
  }
}

// Computes the units of columns [first, last) for all tokens. One thread sums a token's experts, in a fixed order.
template <class Kind>
inline void add_down(const paged_experts_args& args, const Stack& down, const Output& out,
                     const ExpertsScratch& scratch, float (*sums)[kPanelRows], int64_t first, int64_t last) {
  constexpr int kUnitCols = kUnitPanels * kPanelRows;
  const int64_t width = down.rows();
  for (int64_t token = 0; token < args.num_tokens; ++token)
    __builtin_memset(scratch.totals + token * width + first * kUnitCols, 0,
                     sizeof(float) * kUnitCols * (last - first));
  for (const Segment* segment = scratch.segments; segment->count > 0; ++segment) {
    const auto x = Kind::of_segment(scratch.gated, *segment, down.weight);
    for (int64_t unit = first; unit < last; ++unit) {
      Kind::multiply(down, *segment, unit, x, sums);
      for (int r = 0; r < segment->count; ++r) {
        const int pair = scratch.pairs[segment->first + r];
        const Floats weight = broadcast(args.topk_weights[pair]);
        float* total = scratch.totals + pair / args.num_selected * width + unit * kUnitCols;
        for (int p = 0; p < kUnitPanels; ++p, total += kPanelRows)
          store_floats(total, fma(add_bias(load_floats(sums[p * segment->count + r]), down, *segment, unit, p), weight,
                                  load_floats(total)));
      }
    }
  }
  for (int64_t token = 0; token < args.num_tokens; ++token)
    for (int64_t col = first * kUnitCols; col < last * kUnitCols; col += kPanelRows)
      out.store(token, col, kPanelRows, load_floats(scratch.totals + token * width + col), nullptr);
}

template <class Kind>
inline Task run_experts_of(Job& job, const paged_experts_args& args, const Output out, const ExpertsScratch scratch) {
  const Stack gate(args.gate, args.num_experts), up(args.up, args.num_experts), down(args.down, args.num_experts);
  const auto sums = [&](int thread) {
    return reinterpret_cast<float (*)[kPanelRows]>(scratch.sums + thread * kSegmentSums);
  };
  sort_pairs(args, scratch);
  const int64_t num_pairs = static_cast<int64_t>(args.num_tokens) * args.num_selected;
  co_await job.phase(num_pairs, row_cost(args.up.cols), [&](int64_t first, int64_t last, int) {
    const auto token_of = [&](int pair) { return scratch.pairs[pair] / args.num_selected; };
    prepare_pairs<Kind>({args.x, args.x_stride, args.dtype}, token_of, scratch.segments, args.up, scratch.input,
                        first, last);
  });
  const int64_t rows = rows_paid(scratch);
  const int64_t products = gate.is_there() ? 2 : 1;
  co_await job.phase(rows * up.units(), products * kUnitPanels * kPanelRows * args.up.cols,
                     [&](int64_t first, int64_t last, int thread) {
                       inner_segments<Kind>(args, gate, up, down, scratch, sums(thread), first, last);
                     });
  if (args.inner_widths != nullptr) {
    // All ranks have sorted the same pairs.
    args.gather(args.group, scratch.own, up.rows(), num_pairs, args.inner_widths, scratch.joined);
    co_await job.phase(num_pairs, row_cost(args.down.cols), [&](int64_t first, int64_t last, int) {
      const auto itself = [](int pair) { return pair; };
      prepare_pairs<Kind>({scratch.joined, args.down.cols, PAGED_FLOAT32}, itself, scratch.segments, args.down,
                          scratch.gated, first, last);
    });
  }
  co_await job.phase(down.units(), rows * kUnitPanels * kPanelRows * args.down.cols,
                     [&](int64_t first, int64_t last, int thread) {
                       add_down<Kind>(args, down, out, scratch, sums(thread), first, last);
                     });
}

inline Task run_experts(Job& job, const paged_experts_args& args, const Output& out, const ExpertsScratch& scratch) {
  if (!is_dense(args.up.format)) return run_experts_of<GroupRows>(job, args, out, scratch);
  return with_dense(args.up.format,
                    [&](auto of) { return run_experts_of<DenseUnitRows<decltype(of)>>(job, args, out, scratch); });
}

}  // namespace
}  // namespace paged
