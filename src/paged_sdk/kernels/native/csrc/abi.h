// Declares the kernel library's plain C interface, which Python calls through ctypes; here, formats, matrices, products
// with them, and decoder layers. structures.py mirrors each structure field by field.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi_attention.h"
#include "abi_packing.h"
#include "abi_recurrent.h"
#include "abi_routing.h"
#include "abi_sampling.h"

#if defined(_WIN32)
#define PAGED_EXPORT extern "C" __declspec(dllexport)
#else
#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))
#endif

extern "C" {

// ggml's numbers for its tensor types, plus numbers for formats that no file has.
enum PagedFormat : int32_t {
  PAGED_Q4_0 = 2,
  PAGED_Q4_1 = 3,
  PAGED_Q5_0 = 6,
  PAGED_Q5_1 = 7,
  PAGED_Q8_0 = 8,
  PAGED_Q2_K = 10,
  PAGED_Q3_K = 11,
  PAGED_Q4_K = 12,
  PAGED_Q5_K = 13,
  PAGED_Q6_K = 14,
  PAGED_DENSE_FLOAT32 = 257,
  PAGED_DENSE_BFLOAT16 = 258,
  PAGED_DENSE_FLOAT16 = 259,
};

// Grouped codes, with one scale per group of columns. A format number is PAGED_GROUPED, plus one of these kinds, plus
// 65536 times the group size in units of 32 columns. Codes either have 2 to 8 bits and a minimum per group, or are
// 4-bit indices into a table of levels and have no minima.
enum PagedGrouped : int32_t {
  PAGED_GROUPED = 4096,
  PAGED_GROUPED_2 = 0,
  PAGED_GROUPED_3 = 1,
  PAGED_GROUPED_4 = 2,
  PAGED_GROUPED_5 = 3,
  PAGED_GROUPED_6 = 4,
  PAGED_GROUPED_8 = 5,
  PAGED_GROUPED_LEVELS = 6,
  PAGED_GROUPED_LEVELS_OF_16 = 7,  // groups of 16 columns, whatever the format number says
};

enum PagedDtype : int32_t {
  PAGED_FLOAT32 = 0,
  PAGED_BFLOAT16 = 1,
  PAGED_FLOAT8_E4M3 = 2,
  PAGED_FLOAT16 = 3,
  PAGED_Q4 = 4,  // of a cache only: 4-bit codes with a scale and a minimum per 32 elements (q4.h)
};

enum PagedActivation : int32_t { PAGED_SILU = 0, PAGED_GELU_TANH = 1, PAGED_RELU2 = 2 };

// Places of xIELU's numbers: beta x + positive x^2 for x > 0, otherwise beta x + negative (e^min(x, eps) - 1 - x).
enum PagedXielu : int32_t { PAGED_POSITIVE = 0, PAGED_NEGATIVE = 1, PAGED_BETA = 2, PAGED_EPS = 3 };

// Which norm: RMSNorm divides by the root mean square; LayerNorm subtracts the mean and divides by the standard
// deviation.
enum PagedNorm : int32_t { PAGED_RMS_NORM = 0, PAGED_LAYER_NORM = 1 };

// Shape of the weights of query and key norms: [head_dim] shared by all heads, [heads, head_dim], or [heads * head_dim]
// for one norm over all heads.
enum PagedHeadNorm : int32_t { PAGED_SHARED_NORM = 0, PAGED_OWN_NORMS = 1, PAGED_WHOLE_NORM = 2 };

// A weight matrix [rows, cols] in panels of 16 rows (layout.h), with an optional float32 bias [rows]. A matrix packed
// from blocks can be multiplied in two ways: its codes directly, or, for many rows, int8 codes of its Hadamard
// transform, which are made during the product (hadamard_product.h).
struct paged_weight {
  const uint8_t* data;
  const float* bias;
  const int32_t* order;  // [cols]: column i multiplies column order[i] of the input; null: identity
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t in_hadamard;  // 1: multiply in the Hadamard form; 0: multiply the codes directly
};

// Scratch memory of one caller. Two calls must never use it at once.
struct paged_workspace;

// out[m, :] = concat_i(W_i) . norm(x[m, :]) + bias (+ residual[m, :]). x, out and residual share one dtype; strides are
// in elements.
struct paged_linear_args {
  const void* x;
  const void* residual;  // null: none; may be out itself
  void* out;             // null: scratch memory, for a call that returns only `likeliest`
  const float* norm_weight;  // null: no RMSNorm before the product
  int64_t* likeliest;        // [num_rows]: argmax of each row of out, as paged_argmax_args has it; null: not computed
  const paged_weight* weights;
  paged_workspace* workspace;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int32_t num_weights;
  int32_t num_rows;
  int32_t dtype;
  int32_t num_threads;
  float norm_eps;
  int32_t reserved;
};

// out[m, h, :] = W_h . x[m, h, :] for num_heads matrices that the weight stacks vertically, each with a multiple of 16
// rows and no bias. With x_head_stride 0, all heads have the same rows of x.
struct paged_head_product_args {
  const void* x;
  void* out;  // of the same dtype; strides are in elements
  paged_workspace* workspace;
  paged_weight weight;
  int64_t x_stride;
  int64_t x_head_stride;
  int64_t out_stride;
  int64_t out_head_stride;
  int32_t num_heads;
  int32_t num_rows;
  int32_t dtype;
  int32_t num_threads;
};

// All-reduce: sums `count` numbers at `data` over the ranks, in place. Only one thread calls it at a time.
using PagedSum = void (*)(void* group, float* data, int64_t count);

// All-gather of columns: rank i has widths[i] columns of each row; out is [num_rows, sum of widths]. Rows of `own`,
// this rank's columns, are `stride` numbers apart. Only one thread calls it at a time.
using PagedGather = void (*)(void* group, const float* own, int64_t stride, int64_t num_rows, const int32_t* widths,
                             float* out);

// out[t, :] = sum_k topk_weights[t, k] * down_e . (act(gate_e . x[t, :]) * (up_e . x[t, :])), e = topk_ids[t, k]. Each
// weight stacks the packed matrices of num_experts experts vertically, each with a multiple of 32 rows, and may have a
// bias. Without gates, down_e multiplies act(up_e . x[t, :]). If swiglu_limit is set, there are gates; gate and up are
// clamped to it (gate from above only), and the product is (up + 1) * gate * sigmoid(swiglu_alpha * gate).
//
// In tensor parallelism, each rank holds some rows of every expert's matrices, with all columns. The input of down is
// gathered before down; out has the columns of this rank's rows of down.
struct paged_experts_args {
  const void* x;  // [num_tokens, hidden]
  void* out;      // [num_tokens, hidden], of the same dtype
  const float* topk_weights;  // [num_tokens, num_selected], contiguous
  const int64_t* topk_ids;    // [num_tokens, num_selected], contiguous
  paged_workspace* workspace;
  PagedGather gather;           // called if inner_widths is set
  void* group;                  // first argument of gather
  const int32_t* inner_widths;  // [ranks]: columns of down's input per rank; null: this rank has all
  paged_weight gate;            // [num_experts * inner, hidden]; without data: experts have no gates
  paged_weight up;
  paged_weight down;  // [num_experts * hidden, inner]
  int64_t x_stride;   // in elements
  int64_t out_stride;
  int32_t num_experts;
  int32_t num_tokens;
  int32_t num_selected;
  int32_t dtype;
  int32_t num_threads;
  float swiglu_alpha;
  float swiglu_limit;  // 0: none
  int32_t activation;  // of gates, or of up without gates; not with swiglu_limit
};

// A layer's experts, of which a router chooses a few for each token; gate, up and down are stacks of their matrices as
// in paged_experts_args. The experts' output is added to that of the layer's MLP, if it has one, and either may be
// normalized before that by an RMSNorm of its own.
struct paged_mixture {
  const void* router;        // [num_experts, hidden], contiguous; null: the layer has no experts
  const float* router_bias;  // [num_experts], added to the scores; null: none
  const float* router_norm;  // [hidden]: the router reads this RMSNorm of the stream; null: what the experts read
  const float* input_norm;   // [hidden]: the experts read this RMSNorm of the stream; null: what an MLP reads
  const float* output_norm;  // [hidden], beside an MLP: an RMSNorm of the experts' output; null: none
  const float* dense_output_norm;  // likewise, of the MLP's output before the experts' is added
  const float* mlp_gate;  // [hidden]: the MLP's output is multiplied by sigmoid(mlp_gate . its input); null: it is not
  const int32_t* inner_widths;  // as in paged_experts_args
  paged_choice choice;
  paged_weight gate;
  paged_weight up;
  paged_weight down;
  int32_t router_dtype;
  int32_t activation;
  float swiglu_alpha;  // as in paged_experts_args
  float swiglu_limit;
};

// Maximum elements of a head, 2 * half, that an interleaved rotary embedding rotates.
constexpr int32_t kMaxInterleaved = 512;

// Rotary embedding of a step's rows: cosines and sines are [num_rows, half]. Element i of a head is rotated with
// element half + i; if interleaved, 2i with 2i + 1, and the result is stored in the half-split order. Queries may be
// multiplied by a factor per row before that; made in the call, it is 1 + query_scale_beta * log(1 + floor(position /
// query_scale_length)).
struct paged_rope {
  const float* cosines;      // null: made in the call, of frequencies and the rows' positions (step_inputs.h)
  const float* sines;
  const float* query_scales;  // [num_rows]; null: made with the cosines, or queries are left as they are
  const float* frequencies;  // [half], in radians per position; read if cosines are null
  float factor;              // of the cosines and sines that are made
  float query_scale_beta;    // 0: none are made
  int32_t query_scale_length;  // at least 1 with query_scale_beta
  int32_t half;
  int32_t interleaved;
  int32_t reserved;
};

// Multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434): the cache has one vector per token, the rotated
// elements of its key and then its latent vector, of which the keys and values of all heads are projections. The first
// matrix of qkv projects to queries of [nope_dim, rope_dim] elements each, or to the vector that query_up projects to
// them. Sizes are multiples of 16.
//
// Rows attend over latent vectors, for which `absorbing` takes queries to them and `values` takes results back; or, in
// sequences that paged_batch.decompressed marks, over keys and values that key_up and value_up make of them.
struct paged_latent {
  paged_weight down;       // [rank + rope_dim, hidden]; data null: the layer's attention has keys and values
  paged_weight query_up;   // [num_heads * (nope_dim + rope_dim), query rank]; data null: none
  paged_weight absorbing;  // [num_heads * rank, nope_dim]: the transposed matrices of key_up
  paged_weight values;     // [num_heads * value_dim, rank]
  paged_weight key_up;     // [num_heads * nope_dim, rank]
  paged_weight value_up;   // as `values`, maybe in another form
  const float* query_norm;  // [query rank]: of an RMSNorm before query_up
  const float* norm;        // [rank]: of the latent vectors
  int32_t rank;
  int32_t rope_dim;
  int32_t nope_dim;
  int32_t value_dim;
  float norm_eps;
  int32_t decompressed_dtype;  // of keys and values that are made
  int64_t most_decompressed;   // bytes that they may take at once; those of one head always may
};

// Whether qkv project to a gate per element of attention's output, which its sigmoid multiplies: none; after keys and
// values; or within the queries, each head's after its query.
enum PagedGates : int32_t { PAGED_NO_GATES = 0, PAGED_GATES_LAST = 1, PAGED_GATES_WITH_QUERIES = 2 };

// What a layer has in the place of attention: a short convolution with gates before and after it, or without gates and
// followed by the gated delta rule or by Mamba-2's state space. These have what is the same in all steps; a call sets
// rows, inputs and outputs. qkv project to the gates before and after the convolution, and its inputs; or to the inputs
// of the convolution, then gates; or to gates, the inputs of the convolution, and step sizes.
struct paged_recurrent {
  paged_short_conv_args conv;    // weight null: the layer is not recurrent
  paged_gated_delta_args delta;  // rate null: no gated delta rule
  paged_mamba2_args scan;        // rate null: no state space
  paged_weight rates[2];  // of the gated delta rule: strengths, then decays; or one matrix
  int32_t num_rates;
  int32_t reserved;
};

// One decoder layer: attention or a recurrence in its place, and a feed-forward part: an MLP, experts, or both beside
// each other; or one of the two parts alone. Each reads the normalized residual stream, and its output, after a second
// RMSNorm if one is given, is added to the stream. In a parallel layer, the MLP reads the same normalized input as
// attention, and both outputs are added together.
//
// In tensor parallelism, each rank has some heads and neurons. Without widths, output and down have the columns of this
// rank's heads and neurons, and their results are summed over ranks. With widths, output and down have some rows with
// all columns; their inputs and outputs are gathered, so that every number is the same as on one rank.
//
// A layer that shares keys and values attends over those that an earlier layer has written to the same cache. With
// input_gate, the layer then adds norm(input_output . (act(input_gate . stream) * input)), where `input` is a vector of
// the token for this layer. Last, the stream is multiplied by `scale`.
struct paged_layer {
  // Query, key, value; or query and key; or only query; then gates, if any; or one fused matrix. Data null: the layer
  // is a feed-forward part alone.
  paged_weight qkv[4];
  paged_weight output;
  paged_latent latent;  // heads describe its cache then: one KV head of rope_dim + rank elements
  paged_recurrent recurrent;  // there are no heads and no cache then
  paged_mixture mixture;
  paged_weight gate;  // of the MLP; data null: no gate; the activation applies to up
  paged_weight up;    // data null: no MLP
  paged_weight down;
  paged_weight input_gate;  // [input size, hidden]; data null: the layer has no input of its own
  paged_weight input_output;
  const float* input_norm;  // [hidden], after input_output
  const float* attention_norm;  // before attention; null: no norm. mlp_norm likewise, before the feed-forward part
  const float* attention_output_norm;  // null: added without a norm; the same in all layers
  const float* mlp_norm;
  const float* mlp_output_norm;  // null if and only if attention_output_norm is
  const float* attention_norm_bias;  // of a LayerNorm; null: none
  const float* mlp_norm_bias;
  const float* query_norm;  // null: none
  const float* key_norm;
  const float* query_norm_bias;  // of a shared LayerNorm; null: none
  const float* key_norm_bias;
  const int32_t* attended_widths;  // [ranks]: columns of output's input per rank; null: sum over ranks
  const int32_t* inner_widths;     // [ranks]: columns of down's input per rank; null: sum over ranks
  const int32_t* hidden_widths;    // [ranks]: rows of output and down per rank; null: this rank has all
  const float* xielu;  // PagedXielu, in place of `activation` in an MLP without a gate; null: activation
  paged_heads heads;
  paged_cache cache;
  int32_t num_qkv;
  int32_t rope;  // index into the step's rotary embeddings
  int32_t activation;
  float norm_eps;
  float qkv_clip;  // clamp queries, keys and values to this magnitude; 0: no clamp
  int32_t norm;
  int32_t head_norm;
  int32_t parallel;
  int32_t first_hidden;  // this rank's first column of the residual stream, with hidden_widths
  int32_t shares_keys;  // 1: attends over keys and values that an earlier layer has written; qkv has only queries
  int32_t keys_as_values;  // 1: values are the projected keys, before their norm and rotation; qkv has no values
  int32_t value_norm;      // 1: each head's values are divided by their root mean square
  int32_t norms_last;      // 1: queries and keys are normalized after their rotation; 0: before
  int32_t gates;           // PagedGates
  int32_t input_column;    // first column of the layer's vectors in the step's layer_inputs
  float scale;             // 1: the stream is left as it is
};

// Index of a projection in an adapter's updates. Latent attention has down in the place of key, and query_up in that of
// value; recurrent layers have their rates from the place of value on. If query, key, value and attention's gate, or
// gate and up, are one fused matrix, its update has the index of the first.
enum PagedProjection : int32_t {
  PAGED_QKV = 0,
  PAGED_RATES = 2,
  PAGED_OUTPUT = 4,
  PAGED_GATE_UP = 5,
  PAGED_DOWN = 7,
  PAGED_INPUT_GATE = 8,
  PAGED_INPUT_OUTPUT = 9,
  PAGED_PROJECTIONS = 10,
};

// An adapter's update of one product: out = out * gains[0] + gains[1] + up . (down . x), for `rows` outputs from
// `first` on.
struct paged_update {
  const void* down;  // [rank / 4, cols / 16, 4, 16]; null: no update
  const void* up;    // [panels of 16 rows, rank, 16]
  const float* gains;  // [2, 16 * panels]; null: 1 and 0
  int32_t rank;      // a multiple of 4
  int32_t rows;      // up and gains have as many as whole panels do
  int32_t first;
  int32_t dtype;  // of down and up
};

// One rank of several processes that share memory (ranks.cpp).
struct paged_ranks {
  void* memory;
  int64_t capacity;  // floats in a rank's buffer
  uint64_t turn;     // collectives started so far
  int32_t rank;
  int32_t size;
  int32_t failed;  // 1: a rank ended before a collective was complete
  int32_t reserved;
};

// Runs all layers on hidden [num_rows, hidden], float32, contiguous, in place, and writes the keys and values of the
// rows' tokens to their slots. With token_ids, hidden need not be given: the call begins with the tokens' embeddings.
// Of sequence s, only the last cu_seqlens_read[s + 1] - cu_seqlens_read[s] rows are read afterwards; the others keep
// their values from before the last layer that writes keys or states.
struct paged_decoder_args {
  float* hidden;
  const paged_rope* ropes;
  const int64_t* slots;
  const paged_layer* layers;
  paged_workspace* workspace;
  paged_batch batch;
  paged_recurrent_rows recurrent;  // the same tokens, by their states; read by recurrent layers
  const int32_t* cu_seqlens_read;  // [num_seqs + 1]; null: all rows are read
  const paged_update* const* adapters;  // [num_adapters], each [num_layers, PAGED_PROJECTIONS]
  const int32_t* adapter_of_row;        // [num_rows]; -1: none
  PagedSum sum;  // all-reduce of attention and feed-forward outputs; null: one rank
  PagedGather gather;  // null: one rank
  void* group;
  const float* layer_inputs;     // [num_rows, layer_input_stride]; null: no layer has an input of its own
  int64_t layer_input_stride;
  const int32_t* original_rows;  // null from callers. Within the library, of rows that are read: their rows of the step
  const int64_t* token_ids;  // [num_rows]; null: hidden is given
  const int64_t* positions;  // [num_rows]; read by ropes without cosines
  paged_weight embedding;    // read if token_ids are given; its rows are multiplied by both scales, one after the other
  float embedding_scale;
  float stream_scale;
  int32_t num_layers;
  int32_t num_rows;
  int32_t num_threads;
  int32_t num_adapters;
  int32_t num_ropes;
  int32_t hidden_size;
};

// out[row] = norm(x[row]), float32; cols is a multiple of 16.
struct paged_norm_args {
  const float* x;
  const float* weight;  // [cols]
  const float* bias;    // [cols], of a LayerNorm; null: none
  float* out;           // [rows, cols], contiguous, as x is
  int32_t norm;         // PagedNorm
  float eps;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
  int32_t reserved;
};

// out[i, :] = row rows[i] of a weight in float32. A weight packed from blocks is decoded as its file format defines.
struct paged_rows_args {
  const paged_weight* weight;
  const int64_t* rows;  // [num_rows], contiguous
  float* out;           // [num_rows, cols], contiguous
  int32_t num_rows;
  int32_t num_threads;
};

}  // extern "C"
