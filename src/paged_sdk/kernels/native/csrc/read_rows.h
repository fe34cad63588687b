// Restricts a step to the rows whose residual stream is read after its last layer.
#pragma once

#include "abi.h"

namespace paged {
namespace {

inline int query_width(const paged_heads& heads) { return heads.num_heads * heads.head_dim; }
inline bool is_latent(const paged_layer& layer) { return layer.latent.down.data != nullptr; }
inline bool is_recurrent(const paged_layer& layer) { return layer.recurrent.conv.weight != nullptr; }
inline bool has_mixer(const paged_layer& layer) { return layer.qkv[0].data != nullptr; }
inline int latent_query_dim(const paged_latent& latent) { return latent.nope_dim + latent.rope_dim; }
// Elements of the vector that queries are projected from; 0: they are projected from the stream.
inline int query_rank(const paged_latent& latent) { return latent.query_up.data == nullptr ? 0 : latent.query_up.cols; }

// Elements of a row's queries, and of attention's result.
inline int query_width(const paged_layer& layer) {
  return is_latent(layer) ? layer.heads.num_heads * latent_query_dim(layer.latent) : query_width(layer.heads);
}
inline int attended_width(const paged_layer& layer) {
  const paged_recurrent& recurrent = layer.recurrent;
  if (recurrent.delta.rate != nullptr) return recurrent.delta.value_heads * recurrent.delta.value_dim;
  if (recurrent.scan.rate != nullptr) return recurrent.scan.heads * recurrent.scan.head_dim;
  if (is_recurrent(layer)) return recurrent.conv.channels;
  return is_latent(layer) ? layer.heads.num_heads * layer.latent.value_dim : query_width(layer.heads);
}
// Rows of several matrices.
inline int64_t total_rows(const paged_weight* weights, int count) {
  int64_t rows = 0;
  for (int i = 0; i < count; ++i) rows += weights[i].rows;
  return rows;
}
// A projected row of a recurrent layer has what qkv project to, then rates. Others begin with queries. With latent
// attention, what these are projected from follows, then the key that is kept: its rotated elements and the latent
// vector, behind which the product leaves the former.
inline int64_t projected_width(const paged_layer& layer) {
  const paged_heads& heads = layer.heads;
  if (is_recurrent(layer))
    return total_rows(layer.qkv, layer.num_qkv) + total_rows(layer.recurrent.rates, layer.recurrent.num_rates);
  if (is_latent(layer))
    return query_width(layer) + query_rank(layer.latent) + heads.head_dim + layer.latent.rope_dim;
  const int queries = query_width(heads), keys = layer.shares_keys != 0 ? 0 : heads.num_kv_heads * heads.head_dim;
  return queries * (layer.gates != 0 ? 2 : 1) + 2 * keys;
}
// Returns the step's row of a row, which may be one of those that are read.
inline int64_t original_row(const paged_decoder_args& args, int64_t row) {
  return args.original_rows == nullptr ? row : args.original_rows[row];
}

// Returns the step restricted to the rows that are read.
inline paged_decoder_args only_read(const paged_decoder_args& args) {
  paged_decoder_args out = args;
  if (args.cu_seqlens_read == nullptr) return out;
  out.batch.cu_seqlens_q = args.cu_seqlens_read;
  out.num_rows = args.cu_seqlens_read[args.batch.num_seqs];
  return out;
}

// Returns the step's row at position `index` of the rows that are read, which belongs to sequence `seq`.
inline int64_t row_read(const paged_decoder_args& args, int seq, int64_t index) {
  return args.batch.cu_seqlens_q[seq + 1] - args.cu_seqlens_read[seq + 1] + index;
}

// The first columns of each row.
struct Columns {
  float* data;  // null: none
  int64_t stride, count;
};

// Copies the residual stream of the rows that are read to `read`, and moves some of their columns to the front.
inline void gather_read(const paged_decoder_args& args, const Columns columns, float* read, int32_t* original_rows) {
  const int64_t hidden = args.hidden_size;
  for (int s = 0; s < args.batch.num_seqs; ++s) {
    for (int64_t i = args.cu_seqlens_read[s]; i < args.cu_seqlens_read[s + 1]; ++i) {
      const int64_t row = row_read(args, s, i);
      __builtin_memcpy(read + i * hidden, args.hidden + row * hidden, sizeof(float) * hidden);
      if (columns.data != nullptr)
        __builtin_memmove(columns.data + i * columns.stride, columns.data + row * columns.stride,
                          sizeof(float) * columns.count);
      original_rows[i] = static_cast<int32_t>(row);
    }
  }
}

// Writes the adapters of the rows that are read, in gather_read's order.
inline void gather_adapters(const paged_decoder_args& args, int32_t* out) {
  for (int s = 0; s < args.batch.num_seqs; ++s)
    for (int64_t i = args.cu_seqlens_read[s]; i < args.cu_seqlens_read[s + 1]; ++i)
      out[i] = args.adapter_of_row[row_read(args, s, i)];
}

// Copies the residual stream back.
inline void scatter_read(const paged_decoder_args& args, const float* read) {
  const int64_t hidden = args.hidden_size;
  for (int s = 0; s < args.batch.num_seqs; ++s) {
    for (int64_t i = args.cu_seqlens_read[s]; i < args.cu_seqlens_read[s + 1]; ++i)
      __builtin_memcpy(args.hidden + row_read(args, s, i) * hidden, read + i * hidden, sizeof(float) * hidden);
  }
}

}  // namespace
}  // namespace paged
