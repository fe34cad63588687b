// The arguments of the kernels of recurrent layers (structures_recurrent.py mirrors them).
#pragma once

#include <cstdint>

extern "C" {

constexpr int64_t kMostState = 256 * 256;  // of a head

// The rows of a step, as recurrent layers take them: row r has the tokens first_tokens[r] ... first_tokens[r + 1] - 1,
// at least one, and its state in slot slots[r]. If is_new[r] the state is zero, whatever the slot holds.
//
// The last num_drafts[r] tokens are guesses. The slot keeps the state before them, and their inputs. Once it is known
// how many of them were right, the next row of the slot says so: the state first goes through the inputs of the first
// num_replayed[r] that the slot keeps. Or they are guesses still: a row of guesses alone follows the first
// num_earlier[r] of them, and the slot keeps both.
struct paged_recurrent_rows {
  const int64_t* slots;
  const int64_t* first_tokens;  // [num_rows + 1]
  const uint8_t* is_new;
  const int64_t* num_replayed;  // null, as are the next two: all are 0
  const int64_t* num_earlier;   // 0 where any are replayed
  const int64_t* num_drafts;    // with the earlier ones at most most_drafts
  float* guessed;               // [threads, kMostState]: scratch for the states of drafts; null without num_drafts
  int32_t num_rows;
  int32_t reserved;
};

// out[t] = gate_out[t] * activation(bias + sum over k of weight[k] * y[t - taps + 1 + k]), y = gate_in * x, within each
// row and after taps - 1 inputs y in the pool. The last ones before the row's drafts replace them, and then come
// those of the drafts. Sums are float32; y, the sum and its activation are rounded to the dtype, y to the pool's too.
struct paged_short_conv_args {
  paged_recurrent_rows rows;
  const void* x;
  const void* gate_in;   // null: none
  const void* gate_out;  // null: none
  const float* weight;   // [taps, channels]
  const float* bias;     // [channels]; null: none
  void* pool;            // [slots, taps - 1 + most_drafts, channels]
  void* out;             // may be x itself
  int64_t x_stride;      // of x and the gates, in elements
  int64_t out_stride;
  int32_t channels;      // a multiple of 16
  int32_t taps;          // at most 8
  int32_t silu;          // 0: no activation
  int32_t dtype;
  int32_t pool_dtype;
  int32_t num_threads;
  int32_t most_drafts;
  int32_t reserved;
};

// The gated delta rule, then an RMSNorm of each head's output times silu(gate). A head's decay is exp(-rate *
// softplus(rates[decay] + step_bias)), its write strength sigmoid(rates[strength]). All in float32, rounded once.
struct paged_gated_delta_args {
  paged_recurrent_rows rows;
  const void* inputs;       // [tokens, 2 * key_heads * key_dim + value_heads * value_dim]: queries, keys, values
  const void* rates;        // [tokens, 2 * value_heads]: strengths, decays
  const void* gates;        // [tokens, value_heads * value_dim]
  const float* rate;        // [value_heads]
  const float* step_bias;   // [value_heads]
  const float* norm_weight;  // [value_dim]
  float* pool;              // [slots, value_heads, key_dim, value_dim]
  float* kept;              // [slots, most_drafts, columns of inputs and rates]; null: no row has drafts
  void* out;                // [tokens, value_heads * value_dim], contiguous
  int64_t inputs_stride;    // in elements
  int64_t rates_stride;
  int64_t gates_stride;
  int32_t key_heads;
  int32_t value_heads;  // a multiple of key_heads
  int32_t key_dim;      // a multiple of 16, at most 256; value_dim likewise
  int32_t value_dim;
  int32_t dtype;
  int32_t num_threads;
  float norm_eps;
  int32_t most_drafts;
};

// Mamba-2's selective state space, then a skip connection, the gates silu(gate), and an RMSNorm of `norm_size` columns
// at a time. A head's step is softplus(steps + step_bias), its decay exp(-rate * step). All in float32, rounded once.
struct paged_mamba2_args {
  paged_recurrent_rows rows;
  const void* inputs;        // [tokens, heads * head_dim + 2 * groups * state_size]: x, B, C
  const void* steps;         // [tokens, heads]
  const void* gates;         // [tokens, heads * head_dim]
  const float* rate;         // [heads]; step_bias and skip likewise
  const float* step_bias;
  const float* skip;
  const float* norm_weight;  // [heads * head_dim]; null: no norm
  float* pool;               // [slots, heads, state_size, head_dim]
  float* kept;               // [slots, most_drafts, columns of inputs and steps]; null: no row has drafts
  float* read;               // [tokens, heads * head_dim], scratch; may be out, if that is float32
  void* out;                 // [tokens, heads * head_dim], contiguous
  int64_t inputs_stride;     // in elements
  int64_t steps_stride;
  int64_t gates_stride;
  int32_t heads;       // a multiple of groups
  int32_t head_dim;    // a multiple of 16, at most 256
  int32_t groups;      // of heads with the same B and C
  int32_t state_size;  // a multiple of 4, at most 256
  int32_t norm_size;   // a multiple of 16
  int32_t gate_first;  // 1: the norm is of the gated output; 0: the gates multiply the normed one
  int32_t dtype;
  int32_t num_threads;
  float norm_eps;
  int32_t most_drafts;
};

}  // extern "C"
