// Attention of a whole varlen batch, cut into items that threads claim.
#pragma once

#include <algorithm>

#include "attention.h"
#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_few.h"
#include "attention_in_place.h"
#include "attention_int16.h"
#include "attention_int8.h"
#include "linear.h"
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

inline void load_query(const QueryTile& tile, const Matrix& query, int64_t first_token, int kv_head,
                       const paged_heads& heads, float* out) {
  // Scores are in base 2: e^s = 2^(s log2 e). With a softcap, log2 e is applied after the cap.
  const Floats scale = broadcast(heads.softcap > 0.0f ? heads.scale : heads.scale * kLog2E);
  for (int t = 0; t < tile.num_tokens; ++t)
    for (int g = 0; g < tile.group; ++g)
      for (int c = 0; c < heads.head_dim; c += 16)
        store_floats(out + (t * tile.group + g) * heads.head_dim + c,
                     mul(scale, query.load(first_token + t,
                                           static_cast<int64_t>(kv_head * tile.group + g) * heads.head_dim + c)));
}

// Stores values / sum to the caller's rows.
inline void store_tile(const QueryTile& tile, const Partial& state, int64_t first_token, int kv_head,
                       const paged_heads& heads, const Output& out) {
  for (int r = 0; r < tile.rows(); ++r) {
    const int64_t head = kv_head * tile.group + r % tile.group;
    Floats sum = broadcast(state.sum[r]);
    if (heads.sinks != nullptr)
      sum = add(sum, exponential2(broadcast(heads.sinks[head] * kLog2E - state.maximum[r])));
    const Floats inverse = div(broadcast(1.0f), sum);
    for (int c = 0; c < heads.head_dim; c += 16)
      out.store(first_token + r / tile.group, head * heads.head_dim + c,
                mul(inverse, load_floats(state.values + r * heads.head_dim + c)));
  }
}

// A run of spans of a split sequence, for some of its KV heads. The last and longest runs come first, so that threads
// finish together.
struct SplitItem {
  QueryTile tile;
  Pages pages;
  int run;                   // relative to the sequence's first run
  int first_span, end_span;  // bounded by what any row sees

  SplitItem(const AttentionPlan& plan, const paged_cache& cache, int seq, int item)
      : tile{plan.batch.context_lens[seq] - plan.query_tokens(seq), plan.query_tokens(seq), plan.group},
        pages{plan.heads, cache, plan.block_table(seq),
              item % (plan.heads.num_kv_heads / plan.split_heads) * plan.split_heads},
        run(plan.num_runs(seq) - 1 - item / (plan.heads.num_kv_heads / plan.split_heads)) {
    const int index = plan.first_run(seq) + run;
    first_span = std::max(plan.has_runs ? first_span_of_run(index) : index, plan.first_span(tile.first_position));
    end_span = std::min(plan.has_runs ? first_span_of_run(index + 1) : index + 1,
                        ceil_div(plan.batch.context_lens[seq], kSpan));
  }
};

inline void attend_split_item(const AttentionPlan& plan, const SplitItem& item, const Matrix& query,
                              int64_t first_token, const ItemScratch& own, float* partials,
                              const NextTokens& next_tokens) {
  const paged_heads& heads = plan.heads;
  const size_t size = Partial::floats(item.tile.rows(), heads.head_dim);
  float* memory = partials + (static_cast<int64_t>(item.run) * heads.num_kv_heads + item.pages.kv_head) * size;
  const RunItem run{item.tile, item.pages, plan.split_heads, item.first_span, item.end_span};
  const auto load = [&](float* queries) {
    for (int h = 0; h < plan.split_heads; ++h)
      load_query(item.tile, query, first_token, item.pages.kv_head + h, heads,
                 queries + static_cast<int64_t>(h) * item.tile.rows() * heads.head_dim);
  };
#if defined(__AVX512BF16__)
  if (attends_by_pairs(heads)) {
    const FewScratch scratch = FewScratch::at(own.rest, heads);
    load(scratch.query_floats);
    attend_few(run, scratch, memory, size, next_tokens);
    return;
  }
#endif
  if (plan.has_runs) {
    const InPlaceScratch scratch = InPlaceScratch::at(own.rest, heads);
    load(scratch.query);
    attend_in_place(run, scratch, memory, size, next_tokens);
    return;
  }
  const TileScratch scratch = TileScratch::at(own.rest, item.tile.rows(), heads.head_dim);
  load(scratch.query);
  attend_span(item.tile, item.pages, item.first_span * kSpan, scratch,
              Partial::at(memory, item.tile.rows(), heads.head_dim));
}

// Some runs of a tile of query rows, for one KV head. The last tile, which sees the most keys, comes first, so that
// threads finish together.
struct TileItem {
  int index;  // the tile's index in its sequence
  QueryTile tile;
  int kv_head;
  int first_run, end_run;

  TileItem(const AttentionPlan& plan, int seq, int item)
      : index(plan.num_tiles(seq) - 1), tile(plan.tile(seq, index)), kv_head(item % plan.heads.num_kv_heads) {
    int part = item / plan.heads.num_kv_heads;  // tiles, or runs, that come before
    if (!plan.cuts_tiles) {
      tile = plan.tile(seq, index -= part);
      first_run = plan.first_tile_run(tile), end_run = plan.end_tile_run(tile);
      return;
    }
    for (; part >= plan.num_tile_runs(tile); tile = plan.tile(seq, --index)) part -= plan.num_tile_runs(tile);
    first_run = plan.first_tile_run(tile) + part, end_run = first_run + 1;
  }
};

// Attends over runs in order; attend(first_key, end_key, out) computes one run.
template <class Attend>
inline void attend_runs(const AttentionPlan& plan, const TileItem& item, const Partial& total, const Partial& later,
                        const Attend& attend) {
  constexpr int kKeys = kTileRun * kSpan;
  const int first_key = plan.first_span(item.tile) * kSpan;
  attend(std::max(first_key, item.first_run * kKeys), (item.first_run + 1) * kKeys, total);
  for (int run = item.first_run + 1; run < item.end_run; ++run) {
    attend(run * kKeys, (run + 1) * kKeys, later);
    total.merge(later, item.tile.rows(), plan.heads.head_dim);
  }
}

inline void attend_tile_item(const AttentionPlan& plan, const TileItem& item, const Pages& pages, const Matrix& query,
                             int64_t first_token, const ItemScratch& own, const Partial& total) {
  const paged_heads& heads = plan.heads;
  const int rows = item.tile.rows(), size = heads.head_dim;
  const Partial later = Partial::at(own.run, rows, size);
  [[maybe_unused]] Arena arena(own.rest);
  const auto load = [&](float* to) { load_query(item.tile, query, first_token, item.kv_head, heads, to); };
  const auto attend_with = [&](const auto& scratch) {
    attend_runs(plan, item, total, later, [&](int first_key, int end_key, const Partial& out) {
      attend_run(item.tile, pages, first_key, end_key, scratch, out);
    });
  };
#if defined(PAGED_HAS_CODES)
  if (has_codes(heads)) {
    const CodeScratch scratch = CodeScratch::at(arena, rows, size);
    load(scratch.queries);
    code_queries(rows, size, scratch);
    attend_with(scratch);
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if (has_pairs(heads)) {
    const PairScratch scratch = PairScratch::at(arena, rows, size);
    load(later.values);
    round_queries(rows, size, later.values, scratch);
    attend_with(scratch);
    return;
  }
#endif
#if defined(PAGED_HAS_SHORTS)
  if (has_shorts(heads)) {
    const ShortScratch scratch = ShortScratch::at(arena, rows, size);
    load(scratch.queries);
    code_queries(rows, size, scratch);
    attend_with(scratch);
    return;
  }
#endif
  const TileScratch scratch = TileScratch::at(own.rest, rows, size);
  load(scratch.query);
  attend_with(scratch);
}

inline void attend_item(const AttentionPlan& plan, const paged_cache& cache, const Matrix& query, const Output& out,
                        const AttentionScratch& scratch, const ItemScratch& own, int seq, int number,
                        const NextTokens& next_tokens) {
  const paged_heads& heads = plan.heads;
  const int64_t first_token = plan.batch.cu_seqlens_q[seq];
  float* partials = scratch.partials + scratch.offsets.partials[seq];
  if (plan.is_split(seq)) {
    attend_split_item(plan, SplitItem(plan, cache, seq, number), query, first_token, own, partials, next_tokens);
    return;
  }
  const TileItem item(plan, seq, number);
  const Pages pages{heads, cache, plan.block_table(seq), item.kv_head};
  const int64_t first_row = first_token + static_cast<int64_t>(item.index) * plan.tile_tokens;
  if (item.end_run - item.first_run < plan.num_tile_runs(item.tile)) {
    const int run = item.first_run - plan.first_tile_run(item.tile);
    float* memory = partials + plan.first_partial(seq, item.index) +
                    (static_cast<int64_t>(run) * heads.num_kv_heads + item.kv_head) *
                        Partial::floats(item.tile.rows(), heads.head_dim);
    attend_tile_item(plan, item, pages, query, first_row, own,
                     Partial::at(memory, item.tile.rows(), heads.head_dim));
    return;
  }
  const Partial total = Partial::at(own.total, item.tile.rows(), heads.head_dim);
  attend_tile_item(plan, item, pages, query, first_row, own, total);
  store_tile(item.tile, total, first_row, item.kv_head, heads, out);
}

// Merges the partial results of a tile's runs in order, for one KV head, and stores the output. If first_span >= 0,
// each partial result is a single span, starting with first_span, and they are merged as tiles merge them: a run's
// spans, then the runs.
inline void merge_runs(const AttentionPlan& plan, const Output& out, const QueryTile& tile, int num_runs,
                       int64_t first_token, int kv_head, float* partials, int first_span = -1) {
  const paged_heads& heads = plan.heads;
  const auto of_run = [&](int run) {
    const int64_t place = static_cast<int64_t>(run) * heads.num_kv_heads + kv_head;
    return Partial::at(partials + place * Partial::floats(tile.rows(), heads.head_dim), tile.rows(), heads.head_dim);
  };
  const auto end_of_run = [&](int run) {
    return first_span < 0 ? run + 1 : std::min(((first_span + run) / kTileRun + 1) * kTileRun - first_span, num_runs);
  };
  const Partial total = of_run(0);
  for (int run = 0, end; run < num_runs; run = end) {
    end = end_of_run(run);
    const Partial own = of_run(run);
    for (int span = run + 1; span < end; ++span) own.merge(of_run(span), tile.rows(), heads.head_dim);
    if (run > 0) total.merge(own, tile.rows(), heads.head_dim);
  }
  store_tile(tile, total, first_token, kv_head, heads, out);
}

// Lists the first keys of an item, which are prefetched while another item is computed.
inline void look_at(const AttentionPlan& plan, const paged_cache& cache, int seq, int item, NextTokens& next_tokens) {
  if (!plan.is_split(seq) || !plan.has_runs) return;
  const SplitItem next(plan, cache, seq, item);
  next_tokens.look_at({next.tile, next.pages, plan.split_heads, next.first_span, next.end_span});
}

// Computes items [first, last) of a batch with the scratch memory of `thread`.
inline void attend_items(const AttentionPlan& plan, const paged_cache& cache, const Matrix& query, const Output& out,
                         const AttentionScratch& scratch, int64_t first, int64_t last, int thread) {
  const ItemScratch own = scratch.of_thread(plan, thread);
  const int64_t* items = scratch.offsets.items;
  int seq = static_cast<int>(std::upper_bound(items, items + plan.batch.num_seqs, first) - items) - 1;
  for (int64_t item = first; item < last; ++item) {
    const int here = seq;
    NextTokens next_tokens;
    if (item + 1 < last) {
      while (item + 1 >= items[seq + 1]) ++seq;
      look_at(plan, cache, seq, static_cast<int>(item + 1 - items[seq]), next_tokens);
    }
    attend_item(plan, cache, query, out, scratch, own, here, static_cast<int>(item - items[here]), next_tokens);
  }
}

// Performs merges [first, last), one for each sequence and KV head.
inline void merge_items(const AttentionPlan& plan, const Output& out, const AttentionScratch& scratch, int64_t first,
                        int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int s = static_cast<int>(i / plan.heads.num_kv_heads);
    const int kv_head = static_cast<int>(i % plan.heads.num_kv_heads);
    const int tokens = plan.query_tokens(s), length = plan.batch.context_lens[s];
    const int64_t first_token = plan.batch.cu_seqlens_q[s];
    float* partials = scratch.partials + scratch.offsets.partials[s];
    if (plan.is_split(s)) {
      if (tokens > 0)
        merge_runs(plan, out, {length - tokens, tokens, plan.group}, plan.num_runs(s), first_token, kv_head, partials,
                   plan.has_runs ? -1 : plan.first_run(s));
      continue;
    }
    for (int t = 0; plan.cuts_tiles && t < plan.num_tiles(s); ++t) {
      const QueryTile tile = plan.tile(s, t);
      if (plan.num_tile_runs(tile) > 1)
        merge_runs(plan, out, tile, plan.num_tile_runs(tile), first_token + t * plan.tile_tokens, kv_head,
                   partials + plan.first_partial(s, t));
    }
  }
}

// Computes attention of a whole batch.
inline Task attend_batch(Job& job, const AttentionPlan& plan, const paged_cache& cache, const Matrix query,
                         const Output out, const AttentionScratch scratch) {
  scratch.offsets.fill(plan);
  co_await job.phase(scratch.offsets.items[plan.batch.num_seqs], plan.item_cost(),
                     [&plan, &cache, query, out, scratch](int64_t first, int64_t last, int thread) {
                       attend_items(plan, cache, query, out, scratch, first, last, thread);
                     });
  co_await job.phase(static_cast<int64_t>(plan.batch.num_seqs) * plan.heads.num_kv_heads, plan.merge_cost(),
                     [&plan, out, scratch](int64_t first, int64_t last, int) {
                       merge_items(plan, out, scratch, first, last);
                     });
}

}  // namespace
}  // namespace paged
