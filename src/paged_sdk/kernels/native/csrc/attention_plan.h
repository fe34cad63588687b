// Plans the attention of a varlen batch: how it is cut into items that threads claim, and the scratch memory of these.
#pragma once

#include <algorithm>

#include "attention.h"
#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_few.h"
#include "attention_few_q4.h"
#include "attention_in_place.h"
#include "attention_int16.h"
#include "attention_int8.h"
#include "pool.h"

namespace paged {
namespace {

// Approximate query rows of a tile, which share its loads and transposes.
constexpr int kTileRows = 96;
// Faster arithmetic needs more rows to amortize the loads.
constexpr int kPairTileRows = kHasMatrixUnit ? 384 : 192;
constexpr int kCodeTileRows = 384;
// Spans per run of a tile. Each further run takes 2 % of a run's time to merge.
constexpr int kTileRun = 8;

// Whether decodes and drafts may use other arithmetic than prompts. Their arithmetic is then the same at any context
// length.
inline bool is_rounded(const paged_heads& heads) { return heads.products != PAGED_FLOAT32_PRODUCTS; }
inline int tile_rows(const paged_heads& heads) {
  if (has_codes(heads) || has_shorts(heads)) return kCodeTileRows;
  return has_pairs(heads) ? kPairTileRows : kTileRows;
}

// Query heads of a KV head from which decodes are computed as tiles are, where there is a matrix unit: a span is packed
// once for all of them. One thread takes 1.9 ms for 16 heads over 4,096 latent vectors of 576 elements, and 2.9 ms for
// 15 that read them in place; with 128 elements, 0.42 and 0.67 ms. Without a matrix unit, packing takes twice as long.
constexpr int kPackingHeads = 16;

inline bool packs_for_few(const paged_heads& heads) {
  return kHasMatrixUnit && has_pairs(heads) && heads.num_heads / heads.num_kv_heads >= kPackingHeads;
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How a layer's attention over a batch is cut into items.
struct AttentionPlan {
  const paged_heads& heads;
  const paged_batch& batch;
  int group;
  bool has_runs;  // split sequences: runs have several spans; if not, one span, merged in the order of tiles
  int tile_tokens;
  bool cuts_tiles;  // each run of a tile is an item of its own
  int split_heads;  // KV heads per item of a split sequence

  // If there are few runs, each KV head is an item of its own, so that all threads have work; if there are few tiles,
  // each of their runs is an item.
  AttentionPlan(const paged_heads& heads, const paged_batch& batch, int num_threads)
      : heads(heads),
        batch(batch),
        group(heads.num_heads / heads.num_kv_heads),
        has_runs(is_rounded(heads)),
        tile_tokens(std::max(tile_rows(heads) / group, kSplitTokens)),
        cuts_tiles(false),
        split_heads(1) {
    int runs = 0, tiles = 0;
    for (int s = 0; s < batch.num_seqs; ++s) is_split(s) ? runs += num_runs(s) : tiles += num_tiles(s);
    cuts_tiles = num_threads > 1 && tiles * heads.num_kv_heads < 4 * num_threads;
    if (has_runs && runs >= 2 * num_threads) split_heads = heads_together(heads);
  }

  int query_tokens(int seq) const { return batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq]; }
  bool is_split(int seq) const {
    const bool whole = batch.in_chunks != nullptr && batch.in_chunks[seq] != 0 && is_rounded(heads);
    return query_tokens(seq) <= kSplitTokens && !whole && !is_bidirectional(seq);
  }
  bool is_bidirectional(int seq) const {
    return batch.bidirectional_from != nullptr && batch.bidirectional_from[seq] >= 0;
  }
  const int32_t* block_table(int seq) const {
    return batch.block_tables + static_cast<int64_t>(seq) * batch.max_blocks;
  }
  // The first span of a row's window; spans entirely before it are skipped.
  int first_span(int first_position) const {
    return heads.window > 0 && first_position >= heads.window ? (first_position - heads.window + 1) / kSpan : 0;
  }
  int num_spans(int seq) const {
    const int length = batch.context_lens[seq];
    return ceil_div(length, kSpan) - first_span(length - query_tokens(seq));
  }
  int first_run(int seq) const {
    const int span = first_span(batch.context_lens[seq] - query_tokens(seq));
    return has_runs ? run_of_span(span) : span;
  }
  int num_runs(int seq) const {
    const int last_span = (batch.context_lens[seq] - 1) / kSpan;
    return (has_runs ? run_of_span(last_span) : last_span) + 1 - first_run(seq);
  }
  // Number of tiles of a sequence that is not split; below, the runs that a tile sees.
  int num_tiles(int seq) const { return ceil_div(query_tokens(seq), tile_tokens); }
  QueryTile tile(int seq, int index) const {
    const int tokens = query_tokens(seq), first = index * tile_tokens, length = batch.context_lens[seq];
    QueryTile tile{length - tokens + first, std::min(tokens - first, tile_tokens), group};
    if (is_bidirectional(seq)) {
      tile.bidirectional_begin = batch.bidirectional_from[seq], tile.bidirectional_end = length;
      if (heads.window_reaches_ahead) tile.reach = heads.window;
    }
    return tile;
  }
  int first_span(const QueryTile& tile) const {
    return std::max(tile.oldest_of(tile.first_position, heads.window), 0) / kSpan;
  }
  int first_tile_run(const QueryTile& tile) const { return first_span(tile) / kTileRun; }
  int end_tile_run(const QueryTile& tile) const { return ceil_div(tile.end(), kTileRun * kSpan); }
  int num_tile_runs(const QueryTile& tile) const { return end_tile_run(tile) - first_tile_run(tile); }

  int num_items(int seq) const {
    if (query_tokens(seq) == 0) return 0;
    if (is_split(seq)) return num_runs(seq) * (heads.num_kv_heads / split_heads);
    int items = num_tiles(seq);
    for (int t = 0; cuts_tiles && t < num_tiles(seq); ++t) items += num_tile_runs(tile(seq, t)) - 1;
    return items * heads.num_kv_heads;
  }
  int max_rows() const { return tile_tokens * group; }

  // Average cost of an item, and of merging the runs of one KV head, in byte multiply-adds (pool.h). A decode's span of
  // Qwen2.5-1.5B takes 5 us, of which its 393,216 bfloat16 products are a sixth.
  int64_t item_cost() const {
    int64_t spans = 0, runs = 0;
    for (int s = 0; s < batch.num_seqs; ++s) {
      if (!is_split(s)) return 4 * kShareCost;
      spans += num_spans(s);
      runs += num_runs(s);
    }
    return 12 * kSpan * heads.head_dim * group * split_heads * spans / std::max<int64_t>(runs, 1);
  }
  int64_t merge_cost() const {
    int64_t rows = 0;
    for (int s = 0; s < batch.num_seqs; ++s) rows = std::max(rows, num_merged_rows(s));
    return 64 * rows * heads.head_dim;
  }
  // Rows that are merged for one KV head, over all its runs.
  int64_t num_merged_rows(int seq) const {
    if (is_split(seq)) return static_cast<int64_t>(num_runs(seq)) * group;
    int64_t rows = 0;
    for (int t = 0; cuts_tiles && t < num_tiles(seq); ++t) rows += num_tile_runs(tile(seq, t)) * tile(seq, t).rows();
    return rows;
  }
  size_t partial_floats(int seq) const {
    if (query_tokens(seq) == 0) return 0;
    if (!is_split(seq)) return cuts_tiles ? first_partial(seq, num_tiles(seq)) : 0;
    return num_runs(seq) * heads.num_kv_heads * Partial::floats(query_tokens(seq) * group, heads.head_dim);
  }
  // Offset of the partial results of a tile's runs, in floats from the sequence's first.
  size_t first_partial(int seq, int index) const {
    size_t floats = 0;
    for (int t = 0; t < index; ++t)
      floats += num_tile_runs(tile(seq, t)) * heads.num_kv_heads *
                Partial::floats(tile(seq, t).rows(), heads.head_dim);
    return floats;
  }
};

// Prefix sums of each sequence's items and partial results: [num_seqs + 1] each.
struct AttentionOffsets {
  int64_t* items;
  int64_t* partials;  // in floats

  static size_t bytes(int num_seqs) { return line_aligned(sizeof(int64_t) * 2 * (num_seqs + 1)); }
  static AttentionOffsets at(uint8_t* memory, int num_seqs) {
    auto* first = reinterpret_cast<int64_t*>(memory);
    return {first, first + num_seqs + 1};
  }
  // Floats of all partial results, to size the memory before fill.
  static size_t partial_floats(const AttentionPlan& plan) {
    size_t total = 0;
    for (int s = 0; s < plan.batch.num_seqs; ++s) total += plan.partial_floats(s);
    return total;
  }
  void fill(const AttentionPlan& plan) const {
    items[0] = partials[0] = 0;
    for (int s = 0; s < plan.batch.num_seqs; ++s) {
      items[s + 1] = items[s] + plan.num_items(s);
      partials[s + 1] = partials[s] + static_cast<int64_t>(plan.partial_floats(s));
    }
  }
};

// A thread's scratch memory for an item, sized for the largest tile.
struct ItemScratch {
  float* total;  // Partial
  float* run;    // Partial
  float* rest;   // scratch of the kernel that computes the item

  static size_t floats(const AttentionPlan& plan) {
    const int rows = plan.max_rows(), size = plan.heads.head_dim;
    size_t rest = std::max(TileScratch::floats(rows, size), InPlaceScratch::floats(plan.heads));
#if defined(PAGED_HAS_CODES)
    rest = std::max(rest, CodeScratch::floats(rows, size));
#endif
#if defined(PAGED_HAS_SHORTS)
    rest = std::max(rest, ShortScratch::floats(rows, size));
#endif
#if defined(__AVX512BF16__)
    rest = std::max(rest, PairScratch::floats(rows, size));
    rest = std::max(rest, FewScratch::floats(plan.heads));
#endif
#if defined(__AVX512VNNI__)
    if (attends_by_q4(plan.heads)) rest = std::max(rest, Q4Scratch::floats(plan.heads));
#endif
    return 2 * partial_floats(plan) + aligned(rest);
  }
  static ItemScratch at(float* memory, const AttentionPlan& plan) {
    return {memory, memory + partial_floats(plan), memory + 2 * partial_floats(plan)};
  }
  static size_t aligned(size_t floats) { return (floats + 15) & ~static_cast<size_t>(15); }

 private:
  static size_t partial_floats(const AttentionPlan& plan) {
    return aligned(Partial::floats(plan.max_rows(), plan.heads.head_dim));
  }
};

// Scratch memory of a batch's attention: offsets, partial results, and each thread's items.
struct AttentionScratch {
  AttentionOffsets offsets;
  float* partials;
  float* items;
  size_t item_floats;

  static size_t bytes(const AttentionPlan& plan, int num_threads) {
    const size_t partials = ItemScratch::aligned(AttentionOffsets::partial_floats(plan));
    return AttentionOffsets::bytes(plan.batch.num_seqs) +
           sizeof(float) * (partials + num_threads * ItemScratch::floats(plan));
  }
  static AttentionScratch at(uint8_t* memory, const AttentionPlan& plan) {
    const AttentionOffsets offsets = AttentionOffsets::at(memory, plan.batch.num_seqs);
    auto* partials = reinterpret_cast<float*>(memory + AttentionOffsets::bytes(plan.batch.num_seqs));
    const size_t partial_floats = ItemScratch::aligned(AttentionOffsets::partial_floats(plan));
    return {offsets, partials, partials + partial_floats, ItemScratch::floats(plan)};
  }
  ItemScratch of_thread(const AttentionPlan& plan, int thread) const {
    return ItemScratch::at(items + thread * item_floats, plan);
  }
};

}  // namespace
}  // namespace paged
