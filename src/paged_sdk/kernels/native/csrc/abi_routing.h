// Declares the part of the C interface that chooses experts. structures_routing.py mirrors each structure field by
// field.
#pragma once

#include <cstdint>

extern "C" {

struct paged_workspace;  // abi.h

// How an expert's weight follows from the router's scores: a softmax over all experts; the sigmoid of its own score;
// or, for experts that are chosen one after the other by their scores, a softmax over the scores near the chosen one of
// those that are left (SparseMixer: Liu et al., 2023, arXiv 2310.00811).
enum PagedScoring : int32_t { PAGED_SOFTMAX = 0, PAGED_SIGMOID = 1, PAGED_SPARSE_MIXER = 2 };

// How a token's experts are chosen, and what their outputs are multiplied by. Chosen are the experts with the largest
// sums of weight and bias, of the groups with the largest scores; a group's score is the sum of its group_score_size
// largest. If `renormalize`, their weights are divided by max(their sum, min_sum) + sum_offset; last, they are
// multiplied by `scale` and by the experts' own factors.
struct paged_choice {
  const float* bias;     // [num_experts], for the choice alone; null: none
  const float* factors;  // [num_experts]; null: all 1
  int32_t num_experts;
  int32_t num_selected;
  int32_t scoring;     // PagedScoring; the sparse mixer has neither bias nor groups, and does not renormalize
  int32_t num_groups;  // of as many consecutive experts each
  int32_t num_groups_selected;
  int32_t group_score_size;
  int32_t renormalize;
  float min_sum;
  float sum_offset;
  float scale;
  float margin;  // of the sparse mixer: a score is near if it is less by at most this share of the larger magnitude
  int32_t reserved;
};

// Chooses the experts of tokens from scores in float32, bfloat16 or float16.
struct paged_route_args {
  const void* scores;   // [num_tokens, num_experts], contiguous
  float* topk_weights;  // [num_tokens, num_selected], contiguous, as topk_ids are: the largest sum first
  int64_t* topk_ids;
  paged_workspace* workspace;
  paged_choice choice;
  int32_t num_tokens;
  int32_t dtype;
  int32_t num_threads;
  int32_t reserved;
};

}  // extern "C"
