// Declares the part of the C interface that chooses tokens. structures_sampling.py mirrors each structure field by
// field.
#pragma once

#include <cstdint>

extern "C" {

struct paged_workspace;  // abi.h

// out[row] = argmax of x[row], the first of equal maxima; -1 if a number is NaN or the maximum is not finite.
struct paged_argmax_args {
  const float* x;
  int64_t* out;
  int64_t x_stride;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
  int32_t reserved;
};

// How the tokens of a row are drawn. Temperature 0 takes the likeliest token; otherwise a token's weight is
// e^((logit - largest logit) / temperature). Top-k keeps the tokens with the largest logits, top-p as many of these as
// reach its share of their weight, min-p those with at least its share of the largest weight. Of tokens that tie for
// the last place of top-k or top-p, the first are kept.
struct paged_draw_settings {
  int64_t stream;  // of the row's random numbers, where its draws name none
  double temperature;
  double top_p;   // above 0; 1 or more keep all
  double min_p;   // 0 to 1; 0 keeps all
  int64_t top_k;  // at least 1; vocab_size or more keep all
};

// Draws tokens, -1 for rows with NaN or whose largest logit is not finite. A draw inverts the cumulative distribution
// of the tokens that are kept, at the number of SplitMix64 (Steele, Lea and Flood, 2014) at `position` in `stream`.
// With top-k or top-p, tokens are in the order of falling logits, and equal ones in that of their ids; otherwise in
// that of their ids. If a draw has proposals, the first that is kept is its token; there is none below 0.
struct paged_draw_args {
  const float* logits;                  // [num_rows, vocab_size]
  const paged_draw_settings* settings;  // [num_rows]
  const int64_t* first_draws;  // [num_rows + 1]: row r has draws first_draws[r] ... first_draws[r + 1] - 1; null: one
  const int64_t* streams;      // [num_draws]; null: those of the rows' settings
  const int64_t* positions;    // [num_draws]
  const int64_t* proposed;  // [num_draws, num_proposed], below vocab_size
  int64_t* tokens;          // [num_draws]
  paged_workspace* workspace;
  int64_t stride;  // of the logits
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_proposed;
  int32_t num_threads;
};

// Computes logprobs: logit - log(sum of e^logit) over a row. `top_tokens` are the row's likeliest tokens in the order
// of falling logits, equal ones in that of their ids. A row with NaN, or whose largest logit is not finite, has NaN for
// every logprob, and its likeliest tokens are 0 ... top_n - 1.
struct paged_logprobs_args {
  const float* logits;           // [num_rows, vocab_size]
  const int64_t* chosen_rows;    // [num_chosen], below num_rows
  const int64_t* chosen_tokens;  // [num_chosen], below vocab_size
  double* chosen_logprobs;       // [num_chosen]
  int64_t* top_tokens;           // [num_rows, top_n]
  double* top_logprobs;          // [num_rows, top_n]
  paged_workspace* workspace;
  int64_t stride;  // of the logits
  int64_t num_chosen;
  int32_t num_rows;
  int32_t vocab_size;
  int32_t top_n;  // at most vocab_size
  int32_t num_threads;
};

}  // extern "C"
