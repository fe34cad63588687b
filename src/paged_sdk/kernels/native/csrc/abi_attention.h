// Declares the part of the C interface that attends over a paged cache. structures_attention.py mirrors each structure
// field by field.
#pragma once

#include <cstdint>

extern "C" {

struct paged_workspace;  // abi.h

// The least precise products that attention may use where they are faster: float32, bfloat16, or 8-bit codes when a
// sequence has many query tokens and bfloat16 when it has few. For many query tokens, AVX2 uses 16-bit codes in place
// of either, and AMX uses bfloat16. For few, AVX-512 uses 8-bit codes of queries in place of either over 4-bit pages.
enum PagedProducts : int32_t { PAGED_FLOAT32_PRODUCTS = 0, PAGED_BFLOAT16_PRODUCTS = 1, PAGED_INT8_PRODUCTS = 2 };

// Paged keys and values of one layer: [num_blocks, block_size, num_kv_heads, head_dim], and for f8e4m3 one float32
// scale per token and KV head [num_blocks, block_size, num_kv_heads]. PAGED_Q4 has two elements per byte, scales and
// minimums in bfloat16 [num_blocks, block_size, num_kv_heads, head_dim / 32, 2]. Keys may be stored minus an offset
// vector shared by 128 positions, key_offsets [positions / 128, num_kv_heads, head_dim].
//
// With key_factors, a decoder stores keys and values in another basis, in which rounding costs less: H(key * factors) -
// offset and H(value), where H is the orthonormal Hadamard transform of basis.h. It attends with H(query / factors) and
// transforms the result back. Plain attention has none: its queries and results are in the basis of the cache.
struct paged_cache {
  void* key;
  void* value;
  void* key_scale;
  void* value_scale;
  const float* key_offsets;  // null: keys are stored without offset
  const float* key_factors;  // [num_kv_heads, head_dim]; null: keys and values are stored as they are
};

// A varlen batch over a paged cache. The query tokens of sequence s are cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1,
// the last of its context_lens[s] tokens; block_tables is [num_seqs, max_blocks]. If paged_heads.products allows
// rounding, sequences with up to 8 query tokens (decodes, drafts) use other arithmetic than longer ones. in_chunks
// marks sequences that always use the arithmetic of longer ones, so that a prompt's result does not depend on how it is
// cut into chunks. bidirectional_from marks sequences whose query tokens (of an image, or of an encoder's text) attend
// to each other bidirectionally.
struct paged_batch {
  const int32_t* cu_seqlens_q;
  const int32_t* block_tables;
  const int32_t* context_lens;
  const uint8_t* in_chunks;  // [num_seqs], 0 or 1; null: all 0
  // [num_seqs]: every query token of the sequence sees all keys from this one to the sequence's last, causal mask and
  // window notwithstanding (if window_reaches_ahead, only those within the window); -1: causal. Null: all -1.
  const int32_t* bidirectional_from;
  // [num_seqs], 0 or 1: whether a sequence attends over keys and values decompressed from latent vectors, if many of
  // its rows are computed; null: all 0.
  const uint8_t* decompressed;
  int32_t num_seqs;
  int32_t max_blocks;
};

struct paged_heads {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // a multiple of 16; with PAGED_Q4, of 32
  int32_t block_size;
  int32_t cache_dtype;
  int32_t window;  // keys that a query sees, including its own; 0: all
  int32_t window_reaches_ahead;  // 1: where attention is bidirectional, the window is symmetric
  float scale;
  float softcap;  // 0: none
  int32_t products;  // PagedProducts
  const float* sinks;  // [num_heads]: attention sink, an extra logit per head without a value; null: none
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

}  // extern "C"
