// Divides a step for latent attention, and holds the scratch memory of its parts.
#pragma once

#include <algorithm>

#include "attention_batch.h"
#include "head_product.h"
#include "read_rows.h"

namespace paged {
namespace {

constexpr int kLatentsAtOnce = 1024;  // whose latent vectors are gathered and projected together

// Rows of a sequence below which its keys are not decompressed, however it is marked: of a prompt, the last layer
// computes those alone that are read. A row absorbs projections of as many multiplications as a key takes.
constexpr int kFewestDecompressing = 32;

// Consecutive sequences of a step that attend alike: one over decompressed keys, or several over latent vectors.
struct LatentPart {
  int first, last;  // sequences
  bool is_decompressed;

  // Returns the part that begins with a sequence.
  static LatentPart from(const paged_batch& batch, int seq) {
    if (decompresses(batch, seq)) return {seq, seq + 1, true};
    int last = seq + 1;
    while (last < batch.num_seqs && !decompresses(batch, last)) ++last;
    return {seq, last, false};
  }
  // Returns the sequences as a batch, with the step's rows.
  paged_batch of(const paged_batch& batch) const {
    paged_batch out = batch;
    out.cu_seqlens_q += first, out.context_lens += first, out.num_seqs = last - first;
    out.block_tables += static_cast<int64_t>(first) * batch.max_blocks;
    if (batch.in_chunks != nullptr) out.in_chunks += first;
    if (batch.bidirectional_from != nullptr) out.bidirectional_from += first;
    out.decompressed = nullptr;
    return out;
  }

 private:
  static bool decompresses(const paged_batch& batch, int seq) {
    return batch.decompressed != nullptr && batch.decompressed[seq] != 0 &&
           batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq] >= kFewestDecompressing;
  }
};

inline int first_row(const paged_batch& batch) { return batch.cu_seqlens_q[0]; }
inline int num_rows(const paged_batch& batch) { return batch.cu_seqlens_q[batch.num_seqs] - batch.cu_seqlens_q[0]; }

// Scratch memory of sequences that attend over latent vectors.
struct AbsorbedScratch {
  int32_t* starts;   // [num_seqs + 1]: cu_seqlens_q of these rows alone
  float* queries;    // [rows, heads, key elements]
  float* results;    // likewise
  HeadScratch absorbing, values;
  uint8_t* attention;

  static AbsorbedScratch at(Arena& arena, const paged_layer& layer, const paged_batch& part, int num_threads) {
    const paged_heads& heads = layer.heads;
    const int rows = num_rows(part), count = heads.num_heads;
    const size_t numbers = static_cast<size_t>(rows) * query_width(heads);
    AbsorbedScratch out{};
    out.starts = arena.take<int32_t>(part.num_seqs + 1);
    out.queries = arena.take<float>(numbers);
    out.results = arena.take<float>(numbers);
    out.absorbing = HeadScratch::at(arena, HeadWeights(layer.latent.absorbing, count), count, rows, num_threads);
    out.values = HeadScratch::at(arena, HeadWeights(layer.latent.values, count), count, rows, num_threads);
    const AttentionPlan plan(heads, part, num_threads);
    out.attention = arena.take<uint8_t>(AttentionScratch::bytes(plan, num_threads));
    return out;
  }
};

// Attention of one sequence's rows over decompressed keys and values, some heads at a time, as over one block that has
// all of its keys.
struct Decompressed {
  paged_heads heads;  // of the heads that are decompressed together
  int32_t starts[2], block = 0, context_len;
  uint8_t in_chunk = 1;

  Decompressed(const paged_layer& layer, const paged_batch& part) : heads(layer.heads) {
    const paged_latent& latent = layer.latent;
    const int widest = std::max(latent_query_dim(latent), latent.value_dim);
    starts[0] = 0, starts[1] = num_rows(part);
    context_len = part.context_lens[0];
    heads.head_dim = (widest + 15) / 16 * 16;
    heads.cache_dtype = latent.decompressed_dtype;
    heads.block_size = context_len;
    const int64_t most = std::max<int64_t>(1, latent.most_decompressed / (2 * key_bytes() * context_len));
    const int all = heads.num_heads, groups = static_cast<int>((all + most - 1) / most);
    heads.num_heads = heads.num_kv_heads = ceil_div(all, groups);
  }
  int64_t key_bytes() const { return int64_t{heads.head_dim} * (heads.cache_dtype == PAGED_FLOAT32 ? 4 : 2); }
  int keys_at_once() const { return std::min(context_len, kLatentsAtOnce); }
  paged_heads of(int count) const {
    paged_heads out = heads;
    out.num_heads = out.num_kv_heads = count;
    return out;
  }
  size_t attention_bytes(int count, int num_threads) const {
    const paged_heads some = of(count);
    const paged_batch whole = batch();
    return AttentionScratch::bytes(AttentionPlan(some, whole, num_threads), num_threads);
  }
  paged_batch batch() const { return {starts, &block, &context_len, &in_chunk, nullptr, nullptr, 1, 1}; }
};

// Scratch memory of that.
struct DecompressedScratch {
  float* queries;   // [rows, all heads, head_dim]
  float* results;   // [rows, heads together, head_dim]
  float* latents;   // [keys at once, rank]
  uint8_t* keys;    // [keys, heads together, head_dim]
  uint8_t* values;  // likewise
  HeadScratch key_up, value_up;
  uint8_t* attention;

  static DecompressedScratch at(Arena& arena, const paged_layer& layer, const Decompressed& shape, int num_threads) {
    const paged_latent& latent = layer.latent;
    const int all = layer.heads.num_heads, together = shape.heads.num_heads, at_once = shape.keys_at_once();
    const size_t rows = shape.starts[1], bytes = shape.key_bytes() * together * shape.context_len;
    DecompressedScratch out{};
    out.queries = arena.take<float>(rows * all * shape.heads.head_dim);
    out.results = arena.take<float>(rows * together * shape.heads.head_dim);
    out.latents = arena.take<float>(static_cast<size_t>(at_once) * latent.rank);
    out.keys = arena.take<uint8_t>(bytes);
    out.values = arena.take<uint8_t>(bytes);
    out.key_up = HeadScratch::at(arena, HeadWeights(latent.key_up, all), 1, at_once, num_threads);
    out.value_up = HeadScratch::at(arena, HeadWeights(latent.value_up, all), 1, at_once, num_threads);
    // The last heads may be fewer, and their attention divided among more items.
    const size_t last = shape.attention_bytes((all - 1) % together + 1, num_threads);
    out.attention = arena.take<uint8_t>(std::max(last, shape.attention_bytes(together, num_threads)));
    return out;
  }
};

// Returns the bytes that the largest part of a batch takes.
inline size_t latent_bytes(const paged_layer& layer, const paged_batch& batch, int num_threads) {
  size_t most = 0;
  for (int s = 0; s < batch.num_seqs;) {
    const LatentPart part = LatentPart::from(batch, s);
    const paged_batch rows = part.of(batch);
    Arena arena(nullptr);
    if (part.is_decompressed) {
      DecompressedScratch::at(arena, layer, Decompressed(layer, rows), num_threads);
    } else {
      AbsorbedScratch::at(arena, layer, rows, num_threads);
    }
    most = std::max(most, arena.used());
    s = part.last;
  }
  return most;
}

}  // namespace
}  // namespace paged
