// Cuts the keys of sequences with few query tokens (decodes, drafts) into runs of spans.
//
// Memory is read in its order: the vectors of a token's KV heads are adjacent. Reading one head after the other leaves
// gaps, which reduce the bandwidth from 47 to 19 GB/s. So if there are enough items, an item has several heads,
// processes some tokens of all of them at a time, and prefetches what it reads next, cache line by cache line.
//
// Spans of 128 keys form runs, which are short for the first keys: a run's spans add to one state, and only runs are
// merged. Merging single spans took a fifth of the arithmetic at 16,000 keys.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace paged {
namespace {

// Sequences with at most this many query tokens (decodes, drafts) are split into runs, which any free thread can claim.
constexpr int kSplitTokens = 8;

// Bytes of a token that are read together: few enough that 32 tokens' values and the prefetched lines stay in a cache.
constexpr int kTokenBytes = 1024;

inline int vector_bytes(const paged_heads& heads) {
  return with_element(heads.cache_dtype, [&](auto of) { return bytes_of<decltype(of)>(heads.head_dim); });
}

// Returns the number of KV heads of an item that are read together.
inline int heads_together(const paged_heads& heads) {
  const int bytes = vector_bytes(heads);
  int count = heads.num_kv_heads;
  while (count > 1 && (heads.num_kv_heads % count != 0 || count * bytes > kTokenBytes)) --count;
  return count;
}

// Runs begin at fixed positions and have one span each up to 1,024 keys, two up to 4,096, four up to 16,384, then
// eight: enough runs for all threads at any length, and few to merge in a long context.
struct RunLevel {
  int run, span;  // the first of the level
  int spans;      // per run
};
constexpr RunLevel kRunLevels[] = {{44, 128, 8}, {20, 32, 4}, {8, 8, 2}, {0, 0, 1}};

inline int run_of_span(int span) {
  for (const RunLevel& level : kRunLevels)
    if (span >= level.span) return level.run + (span - level.span) / level.spans;
  return 0;
}
inline int first_span_of_run(int run) {
  for (const RunLevel& level : kRunLevels)
    if (run >= level.run) return level.span + (run - level.run) * level.spans;
  return 0;
}

// Rows that are processed at once, limited by registers. In float32, six accumulators take 12 of 16 registers on AVX2;
// with pairs, each row has two accumulators of scores, or four of two chunks of values, of 32 registers.
constexpr int kRowsAtOnce = 6;

// Calls take(first, integral_constant<count>) for blocks of up to kRowsAtOnce rows of nearly equal size.
template <class Take>
inline void in_row_blocks(int rows, const Take& take) {
  const int blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int block = 0; block < blocks; ++block) {
    const int first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    if (count == 1) take(first, std::integral_constant<int, 1>{});
    if (count == 2) take(first, std::integral_constant<int, 2>{});
    if (count == 3) take(first, std::integral_constant<int, 3>{});
    if (count == 4) take(first, std::integral_constant<int, 4>{});
    if (count == 5) take(first, std::integral_constant<int, 5>{});
    if (count == 6) take(first, std::integral_constant<int, 6>{});
  }
}

// Prefetch distance of keys and values, into the second-level cache. On a Zen 4 with large pages, two threads read
// 16,000 keys of Qwen's shape at 17 GB/s with 2 KiB, 21 with 4, 27 with 8, 33 with 16 and 32 with 32; prefetching into
// the first-level cache gives 18 at any distance.
constexpr int kBytesAhead = 16384;
constexpr int kMostTokensAhead = kSpan;

inline int tokens_ahead(const paged_heads& heads, int num_heads) {
  const int bytes = num_heads * vector_bytes(heads);
  return std::min((kBytesAhead + bytes - 1) / bytes, kMostTokensAhead);
}

// The part [begin, end) of a span, or of `width` keys, that an item's rows see.
struct SpanKeys {
  int begin, end;

  SpanKeys(const QueryTile& tile, const paged_heads& heads, int first_key, int width = kSpan)
      : begin(heads.window > 0 ? std::max(tile.first_position - heads.window + 1 - first_key, 0) : 0),
        end(std::min(tile.first_position + tile.num_tokens - first_key, width)) {}
};

// Spans [first, last) of one sequence, for num_heads KV heads from pages.kv_head on.
struct RunItem {
  const QueryTile& tile;
  const Pages& pages;
  int num_heads;
  int first, last;
};

// Prefetches the scales and minimums of a token's 4-bit vectors, of num_heads heads with `groups` groups each.
inline void prefetch_parameters(const void* scales, int64_t vector, int groups, int num_heads) {
  constexpr int kBytes = 4;
  const uint8_t* first = static_cast<const uint8_t*>(scales) + vector * groups * kBytes;
  for (int i = 0; i < num_heads * groups * kBytes; i += 64) __builtin_prefetch(first + i, 0, 2);
}

// The first tokens of an item, which are prefetched while the item before is computed.
struct NextTokens {
  const uint8_t* tokens[kMostTokensAhead];
  int count = 0;

  void look_at(const RunItem& item) { look_at(item, item.first * kSpan, kSpan); }
  // The same, for `width` keys from first_key on.
  void look_at(const RunItem& item, int first_key, int width) {
    const SpanKeys seen(item.tile, item.pages.heads, first_key, width);
    count = std::max(std::min(seen.end - seen.begin, tokens_ahead(item.pages.heads, item.num_heads)), 0);
    int64_t vectors[kMostTokensAhead];
    item.pages.vectors_of(first_key + seen.begin, first_key + seen.begin + count, vectors);
    const paged_heads& heads = item.pages.heads;
    const int64_t bytes = vector_bytes(heads);
    for (int i = 0; i < count; ++i) tokens[i] = static_cast<const uint8_t*>(item.pages.cache.key) + vectors[i] * bytes;
    for (int i = 0; heads.cache_dtype == PAGED_Q4 && i < count; ++i)
      prefetch_parameters(item.pages.cache.key_scale, vectors[i], heads.head_dim / kQ4Group, item.num_heads);
  }
};

// A queue of tokens to prefetch, for an item's heads: first the keys of a span, then its values, then keys of the next
// span.
struct PrefetchQueue {
  const uint8_t* const* token;  // the next token's first vector
  const uint8_t* const* end;
  int head, num_heads;

  // Prefetches one vector.
  [[gnu::always_inline]] void fetch(int bytes) {
    if (token == end) return;
    const uint8_t* vector = *token + head * bytes;
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(vector + i, 0, 2);
    if (++head == num_heads) head = 0, ++token;
  }
};

}  // namespace
}  // namespace paged
