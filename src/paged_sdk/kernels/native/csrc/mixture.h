// Runs the feed-forward part of a layer with experts: a router selects a few for each token.
#pragma once

#include <limits>

#include "experts.h"

namespace paged {
namespace {

// Scratch memory of one layer's feed-forward part.
struct MixtureScratch {
  float* normed;         // [rows, hidden]
  float* probabilities;  // [rows, num_experts padded to whole vectors]
  float* topk_weights;   // [rows, num_selected]
  int64_t* topk_ids;     // [rows, num_selected]
  ExpertsScratch experts;

  static MixtureScratch at(Arena& arena, const paged_decoder_args& args, const paged_layer& layer) {
    const int64_t rows = args.num_rows, selected = rows * layer.router.num_selected;
    MixtureScratch out{};
    out.normed = arena.take<float>(rows * layer.gate.cols);
    out.probabilities = arena.take<float>(rows * padded(layer.router.num_experts));
    out.topk_weights = arena.take<float>(selected);
    out.topk_ids = arena.take<int64_t>(selected);
    out.experts = ExpertsScratch::at(arena, out.chosen(args, layer), args.num_threads);
    return out;
  }
  static size_t bytes(const paged_decoder_args& args, const paged_layer& layer) {
    Arena arena(nullptr);
    at(arena, args, layer);
    return arena.used();
  }

  static int padded(int num_experts) { return (num_experts + 15) / 16 * 16; }

  // Returns the arguments of the experts' computation, once they are chosen.
  paged_experts_args chosen(const paged_decoder_args& args, const paged_layer& layer) const {
    paged_experts_args out{};
    out.x = normed;
    out.topk_weights = topk_weights;
    out.topk_ids = topk_ids;
    out.gather = args.gather;
    out.group = args.group;
    out.inner_widths = layer.inner_widths;
    out.gate = layer.gate;
    out.up = layer.up;
    out.down = layer.down;
    out.x_stride = layer.gate.cols;
    out.num_experts = layer.router.num_experts;
    out.num_tokens = args.num_rows;
    out.num_selected = layer.router.num_selected;
    out.dtype = PAGED_FLOAT32;
    out.swiglu_alpha = layer.router.swiglu_alpha;
    out.swiglu_limit = layer.router.swiglu_limit;
    out.activation = layer.activation;
    return out;
  }
};

// out[r][expert] = router . x[r] for kRows rows; the order of a sum does not depend on kRows.
template <int kRows>
inline void score_rows(const Matrix& router, int64_t expert, const float* x, int cols, float* out, int64_t out_stride) {
  Floats sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = zero_floats();
  for (int c = 0; c < cols; c += 16) {
    const Floats w = router.load(expert, c);
    for (int r = 0; r < kRows; ++r) sums[r] = fma(w, load_floats(x + static_cast<int64_t>(r) * cols + c), sums[r]);
  }
  for (int r = 0; r < kRows; ++r) out[r * out_stride + expert] = sum_of(sums[r]);
}

// Scores experts [first, last) for all rows. A few rows stay in the first-level cache while the router's weights
// stream.
inline void score_experts(const paged_router& description, const float* x, int num_rows, int cols, float* out,
                          int64_t first, int64_t last) {
  constexpr int kTile = 4;
  const Matrix router{description.weight, cols, description.dtype};
  const int64_t width = MixtureScratch::padded(description.num_experts);
  int64_t row = 0;
  for (; row + kTile <= num_rows; row += kTile)
    for (int64_t expert = first; expert < last; ++expert)
      score_rows<kTile>(router, expert, x + row * cols, cols, out + row * width, width);
  for (; row < num_rows; ++row)
    for (int64_t expert = first; expert < last; ++expert)
      score_rows<1>(router, expert, x + row * cols, cols, out + row * width, width);
}

// Selects a token's experts by softmax of their scores. If a score is NaN, weights are NaN and the selection is
// arbitrary.
inline void choose_experts(const paged_router& router, float* scores, float* topk_weights, int64_t* topk_ids) {
  const int num_experts = router.num_experts, width = MixtureScratch::padded(num_experts);
  if (router.bias != nullptr)
    for (int e = 0; e < num_experts; ++e) scores[e] += router.bias[e];
  for (int e = num_experts; e < width; ++e) scores[e] = -std::numeric_limits<float>::infinity();
  Floats largest = load_floats(scores), sum = zero_floats();
  for (int e = 16; e < width; e += 16) largest = maximum(largest, load_floats(scores + e));
  const Floats top = broadcast(max_of(largest));
  for (int e = 0; e < width; e += 16) {
    const Floats power = exponential(sub(load_floats(scores + e), top));
    store_floats(scores + e, power);
    sum = add(sum, power);
  }
  const Floats total = broadcast(sum_of(sum));
  for (int e = 0; e < width; e += 16) store_floats(scores + e, div(load_floats(scores + e), total));
  float chosen = 0.0f;
  for (int k = 0; k < router.num_selected; ++k) {
    int best = 0;
    for (int e = 1; e < num_experts; ++e)
      if (scores[e] > scores[best]) best = e;
    topk_ids[k] = best;
    topk_weights[k] = scores[best];
    chosen += scores[best];
    scores[best] = -1.0f;  // below every probability
  }
  if (router.renormalize)
    for (int k = 0; k < router.num_selected; ++k) topk_weights[k] /= chosen;
}

// Computes the feed-forward part for all rows of `stream`.
inline Task run_mixture(Job& job, const paged_decoder_args& args, const paged_layer& layer, const float* stream,
                        const Output out, uint8_t* memory) {
  Arena arena(memory);
  const MixtureScratch scratch = MixtureScratch::at(arena, args, layer);
  const paged_router& router = layer.router;
  const int rows = args.num_rows, hidden = layer.gate.cols, width = MixtureScratch::padded(router.num_experts);
  co_await job.phase(rows, row_cost(hidden), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t)
      normalize_into(layer.norm, stream + t * hidden, hidden, layer.mlp_norm, layer.mlp_norm_bias, layer.norm_eps,
                     scratch.normed + t * hidden);
  });
  // A float32 product costs as much as eight byte products.
  co_await job.phase(router.num_experts, int64_t{8} * rows * hidden, [&](int64_t first, int64_t last, int) {
    score_experts(router, scratch.normed, rows, hidden, scratch.probabilities, first, last);
  });
  co_await job.phase(rows, int64_t{500} * width * (1 + router.num_selected), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t)
      choose_experts(router, scratch.probabilities + t * width, scratch.topk_weights + t * router.num_selected,
                     scratch.topk_ids + t * router.num_selected);
  });
  const paged_experts_args chosen = scratch.chosen(args, layer);
  co_await run_experts(job, chosen, out, scratch.experts);
}

}  // namespace
}  // namespace paged
