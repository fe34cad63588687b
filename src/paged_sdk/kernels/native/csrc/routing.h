// Chooses a token's experts, and the weights of their outputs, from a router's scores (paged_choice).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "activations.h"
#include "functions.h"
#include "workspace.h"

namespace paged {
namespace {

// An expert, or a group of them, and its score. The type is local, and so are the sorts of it: those of different
// instruction sets must not become one.
struct Ranked {
  float score;
  int32_t index;
};

// NaN comes first, so that whoever chooses it has a weight of NaN.
struct ComesFirst {
  bool operator()(const Ranked& a, const Ranked& b) const {
    return (std::isnan(a.score) && !std::isnan(b.score)) || a.score > b.score;
  }
};

// Moves the `count` largest of `size` scores to the front, the largest first. Of equal scores, as sigmoids of large
// numbers are, it takes the same as torch.topk on CPUs, whose algorithm it is.
inline void rank_largest(Ranked* scores, int size, int count) {
  if (int64_t{64} * count <= size) {
    std::partial_sort(scores, scores + count, scores + size, ComesFirst{});
  } else {
    std::nth_element(scores, scores + count - 1, scores + size, ComesFirst{});
    std::sort(scores, scores + count - 1, ComesFirst{});
  }
}

// A row of scores is padded to whole vectors.
inline int padded_experts(const paged_choice& choice) { return (choice.num_experts + 15) / 16 * 16; }

// Entries that choose_experts ranks: experts, groups, and the experts of one group.
inline int ranked_entries(const paged_choice& choice) {
  return choice.num_experts + choice.num_groups + choice.num_experts / choice.num_groups;
}

// Cost of one token's choice: about 10 ns per expert.
inline int64_t choice_cost(const paged_choice& choice) { return int64_t{5000} * choice.num_experts; }

// scores = softmax(scores), in place, over `width` padded scores.
inline void apply_softmax(float* scores, int width) {
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
}

// Sets the scores of all experts to -inf, except of those in the groups with the largest scores (DeepSeek-AI, 2024,
// arXiv 2405.04434). `spare` has room for the groups, and for the experts of one.
inline void keep_best_groups(const paged_choice& choice, Ranked* experts, Ranked* spare) {
  const int count = choice.num_groups, size = choice.num_experts / count;
  Ranked *const groups = spare, *const own = spare + count;
  for (int g = 0; g < count; ++g) {
    std::copy_n(experts + g * size, size, own);
    rank_largest(own, size, choice.group_score_size);
    groups[g] = {0.0f, g};
    for (int i = 0; i < choice.group_score_size; ++i) groups[g].score += own[i].score;
  }
  rank_largest(groups, count, choice.num_groups_selected);
  for (int g = choice.num_groups_selected; g < count; ++g)
    for (int e = 0; e < size; ++e)
      experts[groups[g].index * size + e].score = -std::numeric_limits<float>::infinity();
}

// The choice of the sparse mixer.
inline void mix_sparsely(const paged_choice& choice, const float* scores, Ranked* left, float* topk_weights,
                         int64_t* topk_ids) {
  for (int e = 0; e < choice.num_experts; ++e) left[e] = {scores[e], e};
  for (int k = 0; k < choice.num_selected; ++k) {
    int best = 0;
    for (int e = 1; e < choice.num_experts; ++e)
      if (ComesFirst{}(left[e], left[best])) best = e;
    const float top = left[best].score;
    float total = 0.0f;
    for (int e = 0; e < choice.num_experts; ++e)
      if (!(top - scores[e] > choice.margin * std::max(std::fabs(scores[e]), top)))
        total += std::exp(left[e].score - top);
    topk_ids[k] = best;
    topk_weights[k] = 1.0f / total;
    left[best].score = -std::numeric_limits<float>::infinity();
  }
}

// Chooses one token's experts. `scores` has padded_experts() numbers, and is overwritten. If a score is NaN, or if one
// of a softmax or of the sparse mixer is +Inf or all are -Inf, a weight is NaN and the choice is arbitrary.
inline void choose_experts(const paged_choice& choice, float* scores, Ranked* ranked, float* topk_weights,
                           int64_t* topk_ids) {
  const int count = choice.num_experts, width = padded_experts(choice);
  if (choice.scoring == PAGED_SPARSE_MIXER) {
    mix_sparsely(choice, scores, ranked, topk_weights, topk_ids);
  } else {
    for (int e = count; e < width; ++e) scores[e] = -std::numeric_limits<float>::infinity();
    if (choice.scoring == PAGED_SOFTMAX) {
      apply_softmax(scores, width);
    } else {
      for (int e = 0; e < width; e += 16) store_floats(scores + e, sigmoid(load_floats(scores + e)));
    }
    for (int e = 0; e < count; ++e) ranked[e] = {choice.bias == nullptr ? scores[e] : scores[e] + choice.bias[e], e};
    if (choice.num_groups_selected < choice.num_groups) keep_best_groups(choice, ranked, ranked + count);
    rank_largest(ranked, count, choice.num_selected);
    float sum = 0.0f;
    for (int k = 0; k < choice.num_selected; ++k) {
      topk_ids[k] = ranked[k].index;
      topk_weights[k] = scores[ranked[k].index];
      sum += topk_weights[k];
    }
    if (choice.renormalize != 0) {
      const float divisor = std::max(sum, choice.min_sum) + choice.sum_offset;
      for (int k = 0; k < choice.num_selected; ++k) topk_weights[k] /= divisor;
    }
  }
  for (int k = 0; k < choice.num_selected; ++k) {
    const float factor = choice.factors == nullptr ? 1.0f : choice.factors[topk_ids[k]];
    topk_weights[k] *= choice.scale * factor;
  }
}

// Scratch memory of choices: each thread's scores and ranked entries.
struct RouteScratch {
  float* scores;
  Ranked* ranked;

  static RouteScratch at(Arena& arena, const paged_choice& choice, int num_threads) {
    RouteScratch out{};
    out.scores = arena.take<float>(static_cast<size_t>(padded_experts(choice)) * num_threads);
    out.ranked = arena.take<Ranked>(static_cast<size_t>(ranked_entries(choice)) * num_threads);
    return out;
  }
  static size_t bytes(const paged_choice& choice, int num_threads) {
    Arena arena(nullptr);
    at(arena, choice, num_threads);
    return arena.used();
  }
};

// Chooses the experts of one token of a route call.
inline void route_token(const paged_route_args& args, const RouteScratch& scratch, int64_t token, int thread) {
  const paged_choice& choice = args.choice;
  const int count = choice.num_experts;
  const Matrix all{args.scores, count, args.dtype};
  float* const scores = scratch.scores + static_cast<int64_t>(thread) * padded_experts(choice);
  for (int e = 0; e < count; e += 16)
    store_floats(scores + e, count - e >= 16 ? all.load(token, e) : all.load_first(token, e, count - e));
  choose_experts(choice, scores, scratch.ranked + static_cast<int64_t>(thread) * ranked_entries(choice),
                 args.topk_weights + token * choice.num_selected, args.topk_ids + token * choice.num_selected);
}

}  // namespace
}  // namespace paged
