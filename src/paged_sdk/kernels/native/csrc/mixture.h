// Runs a layer's experts, of which a router selects a few for each token.
#pragma once

#include "experts.h"
#include "routing.h"

namespace paged {
namespace {

// Scratch memory of a layer's experts.
struct MixtureScratch {
  float* normed;  // [rows, hidden]: what experts read
  float* routed;  // [rows, hidden]: what the router reads; may be `normed`
  float* scores;        // [rows, padded_experts]
  float* topk_weights;  // [rows, num_selected]
  int64_t* topk_ids;    // [rows, num_selected]
  Ranked* ranked;       // per thread: ranked_entries
  ExpertsScratch experts;

  static MixtureScratch at(Arena& arena, const paged_decoder_args& args, const paged_layer& layer) {
    const paged_mixture& mixture = layer.mixture;
    const paged_choice& choice = mixture.choice;
    const int64_t rows = args.num_rows, selected = rows * choice.num_selected;
    const int64_t hidden = mixture.up.cols;
    MixtureScratch out{};
    out.normed = arena.take<float>(rows * hidden);
    out.routed = mixture.router_norm == nullptr ? out.normed : arena.take<float>(rows * hidden);
    out.scores = arena.take<float>(rows * padded_experts(choice));
    out.topk_weights = arena.take<float>(selected);
    out.topk_ids = arena.take<int64_t>(selected);
    out.ranked = arena.take<Ranked>(static_cast<size_t>(ranked_entries(choice)) * args.num_threads);
    out.experts = ExpertsScratch::at(arena, out.chosen(args, mixture), args.num_threads);
    return out;
  }
  static size_t bytes(const paged_decoder_args& args, const paged_layer& layer) {
    Arena arena(nullptr);
    at(arena, args, layer);
    return arena.used();
  }

  // Returns the arguments of the experts' computation, once they are chosen.
  paged_experts_args chosen(const paged_decoder_args& args, const paged_mixture& mixture) const {
    paged_experts_args out{};
    out.x = normed;
    out.topk_weights = topk_weights;
    out.topk_ids = topk_ids;
    out.gather = args.gather;
    out.group = args.group;
    out.inner_widths = mixture.inner_widths;
    out.gate = mixture.gate;
    out.up = mixture.up;
    out.down = mixture.down;
    out.x_stride = mixture.up.cols;
    out.num_experts = mixture.choice.num_experts;
    out.num_tokens = args.num_rows;
    out.num_selected = mixture.choice.num_selected;
    out.dtype = PAGED_FLOAT32;
    out.swiglu_alpha = mixture.swiglu_alpha;
    out.swiglu_limit = mixture.swiglu_limit;
    out.activation = mixture.activation;
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
inline void score_experts(const paged_mixture& mixture, const float* x, int num_rows, int cols, float* out,
                          int64_t first, int64_t last) {
  constexpr int kTile = 4;
  const Matrix router{mixture.router, cols, mixture.router_dtype};
  const int64_t width = padded_experts(mixture.choice);
  int64_t row = 0;
  for (; row + kTile <= num_rows; row += kTile)
    for (int64_t expert = first; expert < last; ++expert)
      score_rows<kTile>(router, expert, x + row * cols, cols, out + row * width, width);
  for (; row < num_rows; ++row)
    for (int64_t expert = first; expert < last; ++expert)
      score_rows<1>(router, expert, x + row * cols, cols, out + row * width, width);
}

// Runs a layer's experts for all rows of `stream`. What they read is left in scratch.normed.
inline Task run_mixture(Job& job, const paged_decoder_args& args, const paged_layer& layer, const float* stream,
                        const Output out, const MixtureScratch scratch) {
  const paged_mixture& mixture = layer.mixture;
  const paged_choice& choice = mixture.choice;
  const int rows = args.num_rows, hidden = mixture.up.cols, width = padded_experts(choice);
  const float eps = layer.norm_eps;
  co_await job.phase(rows, row_cost(hidden), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      const float* const row = stream + t * hidden;
      float* const normed = scratch.normed + t * hidden;
      if (mixture.input_norm != nullptr) {
        normalize_into(PAGED_RMS_NORM, row, hidden, mixture.input_norm, nullptr, eps, normed);
      } else {
        normalize_into(layer.norm, row, hidden, layer.mlp_norm, layer.mlp_norm_bias, eps, normed);
      }
      if (mixture.router_norm != nullptr)
        normalize_into(PAGED_RMS_NORM, row, hidden, mixture.router_norm, nullptr, eps, scratch.routed + t * hidden);
    }
  });
  // A float32 product costs as much as eight byte products.
  co_await job.phase(choice.num_experts, int64_t{8} * rows * hidden, [&](int64_t first, int64_t last, int) {
    score_experts(mixture, scratch.routed, rows, hidden, scratch.scores, first, last);
  });
  co_await job.phase(rows, choice_cost(choice), [&](int64_t first, int64_t last, int thread) {
    Ranked* const ranked = scratch.ranked + static_cast<int64_t>(thread) * ranked_entries(choice);
    for (int64_t t = first; t < last; ++t) {
      float* const scores = scratch.scores + t * width;
      if (mixture.router_bias != nullptr)
        for (int e = 0; e < choice.num_experts; ++e) scores[e] += mixture.router_bias[e];
      choose_experts(choice, scores, ranked, scratch.topk_weights + t * choice.num_selected,
                     scratch.topk_ids + t * choice.num_selected);
    }
  });
  const paged_experts_args chosen = scratch.chosen(args, mixture);
  co_await run_experts(job, chosen, out, scratch.experts);
}

// mlp = mlp + experts, each after its own norm or gate: combines the outputs of a layer's MLP and of the experts beside
// it. `read` is what both have read.
inline auto join_experts(Job& job, const paged_layer& layer, float* mlp, float* experts, const float* read,
                         int num_rows) {
  const int hidden = layer.mixture.up.cols;
  const auto join = [&layer, mlp, experts, read, hidden](int64_t first, int64_t last, int) {
    const paged_mixture& mixture = layer.mixture;
    for (int64_t at = first * hidden; at < last * hidden; at += hidden) {
      if (mixture.dense_output_norm != nullptr) normalize(mlp + at, hidden, mixture.dense_output_norm, layer.norm_eps);
      if (mixture.output_norm != nullptr) normalize(experts + at, hidden, mixture.output_norm, layer.norm_eps);
      Floats share = broadcast(1.0f);
      if (mixture.mlp_gate != nullptr) {
        float score;
        score_rows<1>({mixture.mlp_gate, hidden, PAGED_FLOAT32}, 0, read + at, hidden, &score, 1);
        share = sigmoid(broadcast(score));
      }
      for (int64_t c = at; c < at + hidden; c += 16)
        store_floats(mlp + c, fma(load_floats(mlp + c), share, load_floats(experts + c)));
    }
  };
  return job.phase(num_rows, 3 * row_cost(hidden), join);
}

}  // namespace
}  // namespace paged
