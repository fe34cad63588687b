// Runs between the query-key-value product and attention: head norms, rotary embedding, and writes to the KV cache.
#pragma once

#include <algorithm>

#include "attention.h"
#include "basis.h"
#include "float8.h"
#include "linear.h"

namespace paged {
namespace {

// What new queries, keys and values need: head norms, rotary embedding, and slots in the cache.
struct Placement {
  const paged_heads& heads;
  const paged_cache& cache;
  const paged_batch& batch;
  const paged_layer& layer;
  const paged_rope& rope;
  const int64_t* slots;
};

// Normalizes num_heads heads in place: one norm over all of them, or one per head.
inline void normalize_heads(const paged_layer& layer, const float* norm, const float* bias, int num_heads, float* row) {
  const int size = layer.head_norm == PAGED_WHOLE_NORM ? num_heads * layer.heads.head_dim : layer.heads.head_dim;
  const int count = layer.head_norm == PAGED_WHOLE_NORM ? 1 : num_heads;
  for (int h = 0; h < count; ++h, row += size) {
    const float* weight = layer.head_norm == PAGED_OWN_NORMS ? norm + h * size : norm;
    if (layer.norm == PAGED_LAYER_NORM) {
      normalize_layer(row, size, weight, bias, layer.norm_eps, row);
    } else {
      normalize(row, size, weight, layer.norm_eps);
    }
  }
}

// Normalizes a row's queries and keys in place; there may be no keys.
inline void normalize_queries_and_keys(const paged_layer& layer, float* queries, float* keys, int num_keys) {
  if (layer.query_norm != nullptr)
    normalize_heads(layer, layer.query_norm, layer.query_norm_bias, layer.heads.num_heads, queries);
  if (num_keys > 0 && layer.key_norm != nullptr)
    normalize_heads(layer, layer.key_norm, layer.key_norm_bias, num_keys, keys);
}

// Applies the rotary embedding (Su et al., 2021, arXiv 2104.09864) to one head in place.
inline void rotate_head(float* head, const float* cosines, const float* sines, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const Floats a = load_floats(head + i), b = load_floats(head + half + i);
    const Floats cosine = load_floats(cosines + i), sine = load_floats(sines + i);
    store_floats(head + i, sub(mul(a, cosine), mul(b, sine)));
    store_floats(head + half + i, add(mul(b, cosine), mul(a, sine)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

// Applies the rotary embedding to one head with interleaved pairs; the result is in half-split order.
inline void rotate_neighbours(float* head, const float* cosines, const float* sines, int half) {
  alignas(64) float pairs[kMaxInterleaved];  // the caller has checked the size
  __builtin_memcpy(pairs, head, sizeof(float) * 2 * half);
  for (int i = 0; i < half; ++i) {
    const float a = pairs[2 * i], b = pairs[2 * i + 1];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

// Rotates one head, of the step's row `row`.
inline void rotate(const paged_rope& rope, float* head, int64_t row) {
  const float *const cosines = rope.cosines + row * rope.half, *const sines = rope.sines + row * rope.half;
  if (rope.interleaved != 0) {
    rotate_neighbours(head, cosines, sines, rope.half);
  } else {
    rotate_head(head, cosines, sines, rope.half);
  }
}

// Moves a row's gates from behind each head's query to the row's end.
inline void move_gates(const paged_heads& heads, float* row, float* spare) {
  const int size = heads.head_dim, queries = heads.num_heads * size, others = 2 * heads.num_kv_heads * size;
  for (int h = 0; h < heads.num_heads; ++h) {
    __builtin_memcpy(spare + h * size, row + (2 * h + 1) * size, sizeof(float) * size);
    __builtin_memmove(row + h * size, row + 2 * h * size, sizeof(float) * size);
  }
  __builtin_memmove(row + queries, row + 2 * queries, sizeof(float) * others);
  __builtin_memcpy(row + queries + others, spare, sizeof(float) * queries);
}

// Stores one vector in the cache's dtype. Codes also have scales.
inline void store_vector(const float* vector, int size, int32_t dtype, void* data, void* scales, int64_t index) {
  if (dtype == PAGED_FLOAT32) {
    __builtin_memcpy(static_cast<float*>(data) + index * size, vector, sizeof(float) * size);
  } else if (dtype == PAGED_BFLOAT16) {
    for (int c = 0; c < size; c += 16)
      store_bfloat16(static_cast<uint16_t*>(data) + index * size + c, load_floats(vector + c));
  } else if (dtype == PAGED_FLOAT16) {
    for (int c = 0; c < size; c += 16)
      store_half(static_cast<uint16_t*>(data) + index * size + c, load_floats(vector + c));
  } else if (dtype == PAGED_Q4) {
    store_q4(vector, size, data, scales, index);
  } else {
    const float scale = float8_scale(vector, size), inverse = 1.0f / scale;
    for (int i = 0; i < size; ++i)
      static_cast<uint8_t*>(data)[index * size + i] = to_float8(vector[i] * inverse);
    static_cast<float*>(scales)[index] = scale;
  }
}

// Returns the position of a token within its sequence.
inline int position_of(const paged_batch& batch, int64_t token) {
  const int32_t* next = std::upper_bound(batch.cu_seqlens_q, batch.cu_seqlens_q + batch.num_seqs, token);
  return batch.context_lens[next - 1 - batch.cu_seqlens_q] - static_cast<int>(*next - token);
}

// Processes one row [queries | keys | values]: scales and rotates queries in place, in the cache's basis if it has its
// own, and writes keys and values to the cache. A layer that shares keys has queries only. The row's rotary embedding
// is that of the step's row `rotated`.
inline void place_token(const Placement& placement, float* row, int64_t token, int64_t rotated) {
  const paged_heads& heads = placement.heads;
  const int size = heads.head_dim;
  const paged_layer& layer = placement.layer;
  const bool has_keys = layer.shares_keys == 0;
  const int num_keys = has_keys ? heads.num_kv_heads : 0;
  float* keys = row + heads.num_heads * size;
  float* values = keys + num_keys * size;
  if (layer.keys_as_values != 0) __builtin_memcpy(values, keys, sizeof(float) * num_keys * size);
  if (layer.norms_last == 0) normalize_queries_and_keys(layer, row, keys, num_keys);
  if (layer.value_norm != 0)
    for (int h = 0; h < num_keys; ++h) normalize(values + h * size, size, nullptr, layer.norm_eps);
  if (layer.qkv_clip != 0.0f) {
    const Floats highest = broadcast(layer.qkv_clip), lowest = broadcast(-layer.qkv_clip);
    for (int c = 0; c < (heads.num_heads + 2 * num_keys) * size; c += 16)
      store_floats(row + c, minimum(highest, maximum(lowest, load_floats(row + c))));
  }
  if (placement.rope.query_scales != nullptr) {
    const Floats scale = broadcast(placement.rope.query_scales[rotated]);
    for (int c = 0; c < heads.num_heads * size; c += 16) store_floats(row + c, mul(load_floats(row + c), scale));
  }
  for (int h = 0; h < heads.num_heads + num_keys; ++h) rotate(placement.rope, row + h * size, rotated);
  if (layer.norms_last != 0) normalize_queries_and_keys(layer, row, keys, num_keys);
  if (placement.cache.key_factors != nullptr)
    change_basis(placement.cache.key_factors, heads.num_kv_heads, heads.num_heads / heads.num_kv_heads, size, row,
                 has_keys ? keys : nullptr, values);
  if (!has_keys) return;
  if (placement.cache.key_offsets != nullptr) {
    const int width = heads.num_kv_heads * size;
    const int64_t span = position_of(placement.batch, token) / kSpan;
    const float* offsets = placement.cache.key_offsets + span * width;
    for (int c = 0; c < width; c += 16) store_floats(keys + c, sub(load_floats(keys + c), load_floats(offsets + c)));
  }
  for (int h = 0; h < heads.num_kv_heads; ++h) {
    const int64_t vector = placement.slots[token] * heads.num_kv_heads + h;
    store_vector(keys + h * size, size, heads.cache_dtype, placement.cache.key, placement.cache.key_scale, vector);
    store_vector(values + h * size, size, heads.cache_dtype, placement.cache.value, placement.cache.value_scale,
                 vector);
  }
}

}  // namespace
}  // namespace paged
