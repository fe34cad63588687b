// The plain C interface of the kernel library: what Python's ctypes sees. Structures are mirrored in structures.py,
// field by field.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define PAGED_EXPORT extern "C" __declspec(dllexport)
#else
#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))
#endif

extern "C" {

// ggml's own numbers of the tensor types, and those of forms that no file has.
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

// Codes with a scale for each group of columns: PAGED_GROUPED, plus one of these kinds, plus 65536 times how many 32
// columns a group has. Codes are 2 to 8 bits with minima, or 4 bits that stand for levels, without minima.
enum PagedGrouped : int32_t {
  PAGED_GROUPED = 4096,
  PAGED_GROUPED_2 = 0,
  PAGED_GROUPED_3 = 1,
  PAGED_GROUPED_4 = 2,
  PAGED_GROUPED_5 = 3,
  PAGED_GROUPED_6 = 4,
  PAGED_GROUPED_8 = 5,
  PAGED_GROUPED_LEVELS = 6,
  PAGED_GROUPED_LEVELS_OF_16 = 7,  // columns, whatever the format's number says
};

enum PagedDtype : int32_t { PAGED_FLOAT32 = 0, PAGED_BFLOAT16 = 1, PAGED_FLOAT8_E4M3 = 2, PAGED_FLOAT16 = 3 };

// What attention may multiply where the CPU is faster with it: float32 numbers, bfloat16 ones, or 8-bit codes for many
// tokens of a sequence and bfloat16 for few. For many tokens AVX2 has 16-bit codes in place of both, and a matrix unit
// bfloat16.
enum PagedProducts : int32_t { PAGED_FLOAT32_PRODUCTS = 0, PAGED_BFLOAT16_PRODUCTS = 1, PAGED_INT8_PRODUCTS = 2 };

enum PagedActivation : int32_t { PAGED_SILU = 0, PAGED_GELU_TANH = 1, PAGED_RELU2 = 2 };

// What norms divide by: the root of the mean square, or the deviation from a mean that they take off.
enum PagedNorm : int32_t { PAGED_RMS_NORM = 0, PAGED_LAYER_NORM = 1 };

// Which weights norms of queries and keys have: [head_dim] for all heads, [heads, head_dim], or [heads * head_dim] of
// one norm over all heads.
enum PagedHeadNorm : int32_t { PAGED_SHARED_NORM = 0, PAGED_OWN_NORMS = 1, PAGED_WHOLE_NORM = 2 };

// A weight matrix [rows, cols] in panels of 16 rows (layout.h), with an optional float32 bias [rows]. One that was
// packed from blocks can be multiplied in two ways: as it is, or by int8 codes of its Hadamard transform, which are
// made as it is multiplied and serve many rows (hadamard_product.h).
struct paged_weight {
  const uint8_t* data;
  const float* bias;
  const int32_t* order;  // [cols]: column i multiplies column order[i] of the input; null: column i
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t in_hadamard;  // 0: as it is
};

// Scratch memory and the barrier of one caller: never used by two calls at once.
struct paged_workspace;

// out[m, :] = concat_i(W_i) . norm(x[m, :]) + bias (+ residual[m, :]); x, out and residual share one dtype; strides in
// elements.
struct paged_linear_args {
  const void* x;
  const void* residual;  // null: none; may be out itself
  void* out;
  const float* norm_weight;  // null: no RMSNorm before the product
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

// Adds up what several processes have, count numbers at data each, in place. It is called by one thread at a time.
using PagedSum = void (*)(void* group, float* data, int64_t count);

// Puts together rows of which each process has some columns, widths[i] of process i: out [num_rows, sum of widths].
// Rows of `own` are stride numbers apart. It is called likewise.
using PagedGather = void (*)(void* group, const float* own, int64_t stride, int64_t num_rows, const int32_t* widths,
                             float* out);

// out[t, :] = sum_k topk_weights[t, k] * down_e . (silu(gate_e . x[t, :]) * (up_e . x[t, :])), e = topk_ids[t, k]. Each
// weight is a stack of num_experts packed matrices, one below the other, of a multiple of 32 rows each; it may have a
// bias. With a limit, both factors are clamped to it (the gate from above only), up is one more, and the gate's sigmoid
// is of swiglu_alpha times the gate.
//
// Of experts that several processes compute, each has some rows of every expert's matrices, and all columns. What down
// multiplies is put together before it; out has the columns of this process's rows of down.
struct paged_experts_args {
  const void* x;  // [num_tokens, hidden]
  void* out;      // likewise, of the same dtype
  const float* topk_weights;  // [num_tokens, num_selected], contiguous
  const int64_t* topk_ids;    // likewise
  paged_workspace* workspace;
  PagedGather gather;           // where there are widths
  void* group;                  // for gather
  const int32_t* inner_widths;  // of every process, of what down multiplies; null: nobody else has any
  paged_weight gate;            // [num_experts * inner, hidden]
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
  int32_t reserved;
};

// Keys and values of one layer in pages: [num_blocks, block_size, num_kv_heads, head_dim], and for f8e4m3 one float32
// scale per token and KV head [num_blocks, block_size, num_kv_heads]. Keys may be stored less a vector that those of
// 128 positions have in common, [positions / 128, num_kv_heads, head_dim].
struct paged_cache {
  void* key;
  void* value;
  float* key_scale;
  float* value_scale;
  const float* key_offsets;  // null: keys are stored whole
};

// A varlen batch over pages. Sequence s has query tokens cu_seqlens_q[s] ... cu_seqlens_q[s + 1], the last of its
// context_lens[s] tokens; block_tables is [num_seqs, max_blocks]. Where paged_heads.products allows rounding, up to 8
// query tokens are computed in another form than more, except in sequences that in_chunks marks: these take the form of
// many however few they are, so that a prompt's result does not depend on where it was cut. The query tokens of a
// sequence that both_ways names are those of an image, or of an encoder's text, which see one another.
struct paged_batch {
  const int32_t* cu_seqlens_q;
  const int32_t* block_tables;
  const int32_t* context_lens;
  const uint8_t* in_chunks;  // [num_seqs], 0 or 1; null: all 0
  // [num_seqs]: the first of the keys that all query tokens of the sequence see, up to its last, whatever lies between
  // them and the window, unless that reaches ahead; -1: there are none. Null: all -1.
  const int32_t* both_ways;
  int32_t num_seqs;
  int32_t max_blocks;
};

struct paged_heads {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // a multiple of 16
  int32_t block_size;
  int32_t cache_dtype;
  int32_t window;  // keys that a query sees, its own included; 0: all
  int32_t window_reaches_ahead;  // 1: of a sequence that both_ways names, a query sees as many later keys, and no more
  float scale;
  float softcap;  // 0: none
  int32_t products;  // PagedProducts
  const float* sinks;  // [num_heads]: one more logit of each head, which has no value; null: none
};

// out[t, h, :] = softmax(scale * q . K) V; q and out are [tokens, num_heads, head_dim], strides in elements per token.
struct paged_attention_args {
  const void* query;
  void* out;
  paged_workspace* workspace;
  int64_t query_stride;
  int64_t out_stride;
  paged_heads heads;
  paged_cache cache;
  paged_batch batch;
  int32_t dtype;
  int32_t num_threads;
};

// Chooses a token's experts: the num_selected likeliest of softmax(weight . x + bias).
struct paged_router {
  const void* weight;  // [num_experts, hidden], contiguous; null: there are no experts
  const float* bias;   // [num_experts]; null: none
  int32_t dtype;
  int32_t num_experts;
  int32_t num_selected;
  int32_t renormalize;  // divide the weights of a token's experts by their sum
  float swiglu_alpha;   // as in paged_experts_args
  float swiglu_limit;
};

// The rotary embedding of a step's rows, [num_rows, half] each: element i of a head is paired with element half + i, or
// element 2i with element 2i + 1, and then stored as if it were the other way round.
struct paged_rope {
  const float* cosines;
  const float* sines;
  int32_t half;
  int32_t interleaved;
};

// One decoder layer: attention and gated feed-forward, each after a norm and added to the residual stream, after a
// second norm, an RMSNorm, where that is given. In parallel, the feed-forward reads what attention reads, and what both
// give is added at once. With a router, gate, up and down are stacks of matrices as in paged_experts_args.
//
// Of a layer that several processes compute, each has some heads and neurons. Without widths, the matrices after them
// have the columns of these, and what processes get is added up. With widths, they have all columns and some rows, and
// what processes have is put together before and after: every number is then what one process alone would get.
struct paged_layer {
  paged_weight qkv[3];  // or one that is all three
  paged_weight output;
  paged_router router;
  paged_weight gate;  // data null: there is none, and the activation is up's
  paged_weight up;
  paged_weight down;
  const float* attention_norm;  // null: none; mlp_norm likewise
  const float* attention_output_norm;  // null, in all layers or in none: outputs are added as they are
  const float* mlp_norm;
  const float* mlp_output_norm;  // likewise, null where attention_output_norm is
  const float* attention_norm_bias;  // of layer norms; null: none
  const float* mlp_norm_bias;
  const float* query_norm;  // norm of queries before their positions are applied; null: none
  const float* key_norm;
  const float* query_norm_bias;  // of shared layer norms; null: none
  const float* key_norm_bias;
  const int32_t* attended_widths;  // of every process, of what attention gives; null: output has this process's columns
  const int32_t* inner_widths;     // of what down multiplies; null likewise
  const int32_t* hidden_widths;    // of what output and down give; null: all
  paged_heads heads;
  paged_cache cache;
  int32_t num_qkv;
  int32_t rope;  // which of the step's rotary embeddings
  int32_t activation;
  float norm_eps;
  float qkv_clip;  // largest magnitude of queries, keys and values; 0: any
  int32_t norm;
  int32_t head_norm;
  int32_t parallel;
  int32_t first_hidden;  // the first of this process's hidden_widths columns
};

// The matrices of a layer whose products adapters may update, in this order; query, key and value, and gate and up, may
// also be one matrix, which is then updated under the first of these numbers.
enum PagedProjection : int32_t {
  PAGED_QKV = 0,
  PAGED_OUTPUT = 3,
  PAGED_GATE_UP = 4,
  PAGED_DOWN = 6,
  PAGED_PROJECTIONS = 7,
};

// An adapter's update of one product, from output `first` on: out = out * gains[0] + gains[1] + up . (down . x).
struct paged_update {
  const void* down;  // [rank / 4, cols / 16, 4, 16]; null: none
  const void* up;    // [rows / 16, rank, 16]
  const float* gains;  // [2, rows]; null: 1 and 0
  int32_t rank;      // a multiple of 4
  int32_t rows;      // a multiple of 16, as is first
  int32_t first;
  int32_t dtype;  // of both
};

// One process of several that share memory (ranks.cpp).
struct paged_ranks {
  void* memory;
  int64_t capacity;  // numbers that are added up at once
  uint64_t turn;     // sums so far
  int32_t rank;
  int32_t size;
  int32_t failed;  // whether a rank has ended before a sum was whole
  int32_t reserved;
};

// hidden [num_rows, hidden] float32, contiguous, goes through all layers in place; keys and values of the rows' tokens
// are written to their slots. Of sequence s, the last cu_seqlens_read[s + 1] - cu_seqlens_read[s] rows are read
// afterwards: the others stay as they were before the last layer.
struct paged_decoder_args {
  float* hidden;
  const paged_rope* ropes;
  const int64_t* slots;
  const paged_layer* layers;
  paged_workspace* workspace;
  paged_batch batch;
  const int32_t* cu_seqlens_read;  // [num_seqs + 1]; null: all rows are read
  const paged_update* const* adapters;  // [num_adapters], each [num_layers, PAGED_PROJECTIONS]
  const int32_t* adapter_of_row;        // [num_rows]; -1: none
  PagedSum sum;  // of what attention gives, and what feed-forward gives, of which others have parts; null: nobody has
  PagedGather gather;  // null likewise
  void* group;
  int32_t num_layers;
  int32_t num_rows;
  int32_t num_threads;
  int32_t num_adapters;
};

// out[row] = a norm of x[row], float32, of a multiple of 16 columns.
struct paged_norm_args {
  const float* x;
  const float* weight;  // [cols]
  const float* bias;    // [cols], of a layer norm; null: nothing is added
  float* out;           // [rows, cols], contiguous, as x is
  int32_t norm;         // PagedNorm
  float eps;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
  int32_t reserved;
};

// out[row] = the column of the largest number of x[row], the first of equal ones; -1 where a number is NaN, or the
// largest is not finite.
struct paged_likeliest_args {
  const float* x;
  int64_t* out;
  int64_t x_stride;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
  int32_t reserved;
};

// out[i, :] = row rows[i] of a weight in float32: of one packed from blocks, each number as the file's own format
// decodes it.
struct paged_rows_args {
  const paged_weight* weight;
  const int64_t* rows;  // [num_rows], contiguous
  float* out;           // [num_rows, cols], contiguous
  int32_t num_rows;
  int32_t num_threads;
};

// How the codes of a matrix lie in memory: as a stream of bits for each row, whose words of 32 bits may be apart; in
// bytes whose first code is the high half; or those of eight rows in a word for each column, which are rows 0 2 4 6 1 3
// 5 7 from its lowest bits on.
enum PagedCodeForm : int32_t { PAGED_CODES_STREAM = 0, PAGED_CODES_HIGH_FIRST = 1, PAGED_CODES_OF_EIGHT_ROWS = 2 };

// Codes [rows, cols], of a multiple of 32 columns.
struct paged_codes {
  const uint8_t* data;
  int64_t row_bytes;   // from one row to the next, or from eight to the next eight
  int64_t word_bytes;  // from one word of 32 bits of a row to the next, or from one column's word to the next's
  int32_t bits;
  int32_t form;
  int32_t mask;  // what is kept of each code, once `flip` is exchanged in it
  int32_t flip;
};

// out = [rows, cols] in panels (layout.h), of a format that is_grouped; all inputs are contiguous. A row has as many
// scales as blocks, or two for each block of levels of 16 columns. They are stored as float16 numbers in a unit of each
// row; minima likewise, or as multiples of the scales where those of a row are close to such numbers.
struct paged_grouped_args {
  paged_codes codes;
  const float* scales;
  const float* minima;    // null: none, or levels
  const uint8_t* levels;  // 16, plus 128; null: codes are numbers
  uint8_t* out;           // paged_packed_bytes
  float scale_factor;     // what scales are multiplied by
  float minimum_factor;   // what is added to minima, in scales
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
};

// out [rows, cols] = code times scale plus minimum, of codes that stand for levels where there are some.
struct paged_values_args {
  paged_codes codes;
  const float* scales;  // [rows, groups]
  const float* minima;  // likewise; null: none
  const float* levels;  // [2^bits]; null: codes are numbers
  float* out;
  int32_t group_cols;  // columns that share a scale; a row's last may be fewer
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
};

// out = panels (layout.h) of a dense format of x [rows, cols], float32, bfloat16 or float16, contiguous.
struct paged_dense_args {
  const void* x;
  uint8_t* out;  // paged_packed_bytes
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t dtype;
  int32_t num_threads;
  int32_t reserved;
};

// out [rows, bytes of a row] = GGUF blocks of x [rows, cols], float32, bfloat16 or float16.
struct paged_quantize_args {
  const void* x;
  const float* importance;  // [cols], how much an error in each column counts; null: all alike
  uint8_t* out;
  int64_t x_stride;
  int32_t format;
  int32_t rows;
  int32_t cols;  // a multiple of the format's block
  int32_t dtype;
  int32_t num_threads;
  int32_t reserved;
};

// How a group's scale is found: by the end of its range that is further from zero, by half-quadratic optimization, or
// by its largest magnitude, which levels are multiplied by.
enum PagedFit : int32_t { PAGED_FIT_EDGE = 0, PAGED_FIT_HALF_QUADRATIC = 1, PAGED_FIT_LEVELS = 2 };

// x [rows, cols], float32, bfloat16 or float16, as codes with float16 scales for every 64 columns; all outputs are
// contiguous.
struct paged_quantize_groups_args {
  const void* x;
  uint8_t* codes;          // [rows, cols]
  float* scales;           // [rows, groups]
  float* minima;           // likewise; null with levels
  const float* between;    // [15]: half way between levels in ascending order; null: codes are numbers
  const uint8_t* numbers;  // [16]: the codes of these levels; null likewise
  int64_t x_stride;        // in elements
  int32_t fit;             // PagedFit
  int32_t bits;
  int32_t rows;
  int32_t cols;  // a multiple of 32
  int32_t dtype;
  int32_t num_threads;
};

}  // extern "C"
