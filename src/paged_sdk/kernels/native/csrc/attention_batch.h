// Attention of a whole varlen batch, in the items of its plan.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "basis.h"
#include "linear.h"
#include "pool.h"

namespace paged {
namespace {

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

// Stores values / sum to the caller's rows, in the heads' own basis.
inline void store_tile(const QueryTile& tile, const Partial& state, int64_t first_token, int kv_head,
                       const paged_heads& heads, const paged_cache& cache, const Output& out) {
  for (int r = 0; r < tile.rows(); ++r) {
    const int64_t head = kv_head * tile.group + r % tile.group;
    Floats sum = broadcast(state.sum[r]);
    if (heads.sinks != nullptr)
      sum = add(sum, exponential2(broadcast(heads.sinks[head] * kLog2E - state.maximum[r])));
    const Floats inverse = div(broadcast(1.0f), sum);
    float* const values = state.values + r * heads.head_dim;
    if (cache.key_factors != nullptr) transform_head(values, heads.head_dim);
    for (int c = 0; c < heads.head_dim; c += 16)
      out.store(first_token + r / tile.group, head * heads.head_dim + c, mul(inverse, load_floats(values + c)));
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
#if defined(__AVX512VNNI__)
  if (attends_by_q4(heads)) {
    Arena arena(own.rest);
    const Q4Scratch scratch = Q4Scratch::at(arena, heads);
    load(scratch.queries);
    attend_few_q4(run, scratch, memory, size, next_tokens);
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if (packs_for_few(heads)) {
    const int rows = item.tile.rows(), width = heads.head_dim;
    for (int h = 0; h < plan.split_heads; ++h) {
      Arena arena(own.rest);
      const PairScratch scratch = PairScratch::at(arena, rows, width);
      float* const queries = Partial::at(own.run, rows, width).values;
      const Pages pages{heads, item.pages.cache, item.pages.block_table, item.pages.kv_head + h};
      load_query(item.tile, query, first_token, pages.kv_head, heads, queries);
      round_queries(rows, width, queries, scratch);
      attend_run(item.tile, pages, item.first_span * kSpan, item.end_span * kSpan, scratch,
                 Partial::at(memory + h * size, rows, width));
    }
    return;
  }
  if (attends_by_pairs(heads)) {
    Arena arena(own.rest);
    const FewScratch scratch = FewScratch::at(arena, heads);
    load(scratch.query_floats);
    attend_few(run, scratch, memory, size, next_tokens);
    return;
  }
#endif
  if (plan.has_runs) {
    Arena arena(own.rest);
    const InPlaceScratch scratch = InPlaceScratch::at(arena, heads);
    load(scratch.query);
    attend_in_place(run, scratch, memory, size, next_tokens);
    return;
  }
  Arena arena(own.rest);
  const TileScratch scratch = TileScratch::at(arena, item.tile.rows(), heads.head_dim);
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
  Arena arena(own.rest);
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
    code_queries(rows, heads, scratch);
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
  const TileScratch scratch = TileScratch::at(arena, rows, size);
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
  store_tile(item.tile, total, first_row, item.kv_head, heads, cache, out);
}

// Merges the partial results of a tile's runs in order, for one KV head, and stores the output. If first_span >= 0,
// each partial result is a single span, starting with first_span, and they are merged as tiles merge them: a run's
// spans, then the runs.
inline void merge_runs(const AttentionPlan& plan, const paged_cache& cache, const Output& out, const QueryTile& tile,
                       int num_runs, int64_t first_token, int kv_head, float* partials, int first_span = -1) {
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
  store_tile(tile, total, first_token, kv_head, heads, cache, out);
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
inline void merge_items(const AttentionPlan& plan, const paged_cache& cache, const Output& out,
                        const AttentionScratch& scratch, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int s = static_cast<int>(i / plan.heads.num_kv_heads);
    const int kv_head = static_cast<int>(i % plan.heads.num_kv_heads);
    const int tokens = plan.query_tokens(s), length = plan.batch.context_lens[s];
    const int64_t first_token = plan.batch.cu_seqlens_q[s];
    float* partials = scratch.partials + scratch.offsets.partials[s];
    if (plan.is_split(s)) {
      if (tokens > 0)
        merge_runs(plan, cache, out, {length - tokens, tokens, plan.group}, plan.num_runs(s), first_token, kv_head,
                   partials, plan.has_runs ? -1 : plan.first_run(s));
      continue;
    }
    for (int t = 0; plan.cuts_tiles && t < plan.num_tiles(s); ++t) {
      const QueryTile tile = plan.tile(s, t);
      if (plan.num_tile_runs(tile) > 1)
        merge_runs(plan, cache, out, tile, plan.num_tile_runs(tile), first_token + t * plan.tile_tokens, kv_head,
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
                     [&plan, &cache, out, scratch](int64_t first, int64_t last, int) {
                       merge_items(plan, cache, out, scratch, first, last);
                     });
}

}  // namespace
}  // namespace paged
