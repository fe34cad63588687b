// Attention of a few query rows - decodes, drafts - by dot products of bfloat16 pairs over pages where they lie.
//
// With three to six rows for each key, copying keys into another order costs more than the products: the float path of
// attention.h reads pages at 6 GB/s with two threads. Here a key is loaded once, multiplied with every row, and summed
// across lanes; values are taken two keys at a time, interleaved in registers.
#pragma once

#include "attention_bf16.h"

namespace paged {
namespace {

#if defined(__AVX512BF16__)

constexpr int kChunk = 32;  // bfloat16 elements in a register

// Whether split sequences of these heads are taken by this header.
inline bool reads_in_place(const paged_heads& heads) {
  return has_pairs(heads) && heads.cache_dtype == PAGED_BFLOAT16 &&
         (heads.head_size == 64 || heads.head_size == 96 || heads.head_size == 128 || heads.head_size == 256);
}

// Rows whose sums are held in registers at once: two registers for each chunk and row.
template <int kChunks>
constexpr int kRowsHeld = kChunks <= 2 ? 4 : kChunks <= 4 ? 2 : 1;

inline Pairs load_chunk(const void* data, int64_t vector, int head_size, int chunk) {
  return _mm512_loadu_si512(static_cast<const uint16_t*>(data) + vector * head_size + chunk * kChunk);
}

// Scores of up to kRowsHeld rows against the keys [begin, end) of a span.
template <int kChunks>
inline void score_rows(const Pages& pages, const int64_t* vectors, int begin, int end, const uint32_t* query, int rows,
                       float* scores) {
  constexpr int kRows = kRowsHeld<kChunks>;
  Pairs q[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c)
      q[r][c] = load_pairs(query + (r < rows ? r : 0) * kChunks * kChunk / 2 + c * kChunk / 2);
  for (int i = begin; i < end; ++i) {
    Floats sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = zero_floats();
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Pairs key = load_chunk(pages.cache.key, vectors[i], kChunks * kChunk, c);
      for (int r = 0; r < kRows; ++r) sums[r] = dot_pairs(key, q[r][c], sums[r]);
    }
    for (int r = 0; r < rows; ++r) scores[r * kSpan + i] = sum_of(sums[r]);
  }
}

// The values of the keys [begin, end), weighted, of up to kRowsHeld rows; begin and end are even, and the weights of keys
// that a row does not see are zero.
template <int kChunks>
inline void weigh_values(const Pages& pages, const int64_t* vectors, int begin, int end, const uint32_t* weights,
                         int rows, float* out) {
  constexpr int kRows = kRowsHeld<kChunks>, kSize = kChunks * kChunk;
  Floats low[kRows][kChunks], high[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) low[r][c] = high[r][c] = zero_floats();
  for (int i = begin; i < end; i += 2) {
    Pairs w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = broadcast_pair(weights[(r < rows ? r : 0) * kSpanPairs + i / 2]);
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Pairs first = load_chunk(pages.cache.value, vectors[i], kSize, c);
      const Pairs second = load_chunk(pages.cache.value, vectors[i + 1], kSize, c);
      const Pairs a = _mm512_unpacklo_epi16(first, second), b = _mm512_unpackhi_epi16(first, second);
      for (int r = 0; r < kRows; ++r) {
        low[r][c] = dot_pairs(a, w[r], low[r][c]);
        high[r][c] = dot_pairs(b, w[r], high[r][c]);
      }
    }
  }
  // Interleaving took elements 0-3 of every eight into `low`, 4-7 into `high`.
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      store_floats(out + r * kSize + c * kChunk, _mm512_permutex2var_ps(low[r][c], front, high[r][c]));
      store_floats(out + r * kSize + c * kChunk + 16, _mm512_permutex2var_ps(low[r][c], back, high[r][c]));
    }
  }
}

template <int kChunks>
inline void attend_few_of(const QueryTile& tile, const Pages& pages, int first_key, const PairScratch& scratch,
                          const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int rows = tile.rows(), last_position = tile.first_position + tile.num_tokens - 1;
  const auto oldest_of = [&](int position) { return heads.window > 0 ? position - heads.window + 1 : 0; };
  const int begin = std::max(oldest_of(tile.first_position) - first_key, 0);
  const int end = std::min(last_position + 1 - first_key, kSpan);
  out.clear(rows, heads.head_size);
  if (begin >= end) return;
  // An odd neighbour is read with weight zero: it is the key beside it once more, never a page that may be another's.
  const int even_begin = begin & ~1, even_end = (end + 1) & ~1, width = (end + 31) & ~31;
  int64_t vectors[kSpan];
  pages.vectors_of(first_key + begin, first_key + end, vectors + begin);
  vectors[even_begin] = vectors[begin];
  vectors[even_end - 1] = vectors[end - 1];
  for (int row = 0; row < rows; row += kRowsHeld<kChunks>) {
    const int count = std::min(rows - row, kRowsHeld<kChunks>);
    score_rows<kChunks>(pages, vectors, begin, end, scratch.query + row * heads.head_size / 2, count, scratch.scores);
    for (int r = 0; r < count; ++r) {
      const int position = tile.first_position + (row + r) / tile.group;
      // weigh_row masks what the row does not see; what was never written must be numbers all the same.
      for (int i = 0; i < width; ++i)
        if (i < begin || i >= end) scratch.scores[r * kSpan + i] = 0.0f;
      weigh_row(scratch.scores + r * kSpan, width, std::max(oldest_of(position) - first_key, begin),
                std::min(position + 1 - first_key, end), heads, out.maximum[row + r], out.sum[row + r],
                out.values + (row + r) * heads.head_size, scratch.weights + r * kSpanPairs);
    }
    weigh_values<kChunks>(pages, vectors, even_begin, even_end, scratch.weights, count,
                          out.values + row * heads.head_size);
  }
}

// Attends over the keys of one span, [first_key, first_key + 128), as far as any row sees them; fills `out`. The rows'
// scaled queries are in scratch.total.values in float32.
inline void attend_few(const QueryTile& tile, const Pages& pages, int first_key, const PairScratch& scratch,
                       const Partial& out) {
  for (int i = 0; i < tile.rows() * pages.heads.head_size; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scratch.query + i / 2),
                        round_to_bfloat16(load_floats(scratch.total.values + i)));
  switch (pages.heads.head_size) {
    case 64: return attend_few_of<2>(tile, pages, first_key, scratch, out);
    case 96: return attend_few_of<3>(tile, pages, first_key, scratch, out);
    case 128: return attend_few_of<4>(tile, pages, first_key, scratch, out);
    default: return attend_few_of<8>(tile, pages, first_key, scratch, out);
  }
}

#endif

}  // namespace
}  // namespace paged
