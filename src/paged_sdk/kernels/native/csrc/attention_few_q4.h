// Attention of a few query rows (decodes, drafts) over pages of 4-bit codes, read in place, by AVX-512 dot products of
// 8-bit codes.
//
// A group's codes are multiplied as they are. Scales and minimums are applied to sums: of a key's products with a row,
// per group; of a group's weighted values, once per span, where weights times scales become 16-bit codes. Decoding 32
// elements to bfloat16 first would take nine instructions, of f8e4m3 it takes three.
//
// Queries become int8 codes, one scale per row. Without outliers, which the basis of such pages spreads
// (kernels/kv_basis.py), that rounds them by 0.6 %, where 4 bits round keys by 8 %.
//
// Keys are processed 8 tokens at a time over all heads of the item, values 128: as many bytes as 32 of bfloat16.
#pragma once

#include "attention_pairs.h"
#include "attention_runs.h"
#include "hadamard.h"
#include "workspace.h"

namespace paged {
namespace {

// Whether this header serves split sequences of these heads.
inline bool attends_by_q4(const paged_heads& heads) {
#if defined(__AVX512VNNI__)
  return heads.products != PAGED_FLOAT32_PRODUCTS && heads.cache_dtype == PAGED_Q4;
#else
  (void)heads;
  return false;
#endif
}

#if defined(__AVX512VNNI__)

constexpr int kGroupsAtOnce = 4;  // their scales and minimums fill a 128-bit lane
constexpr float kMostWeight = 65535.0f;

// A thread's scratch memory for the rows of all heads of an item.
struct Q4Scratch {
  float* queries;          // [heads * rows, head_dim], scaled
  int8_t* query_codes;     // [heads * rows, head_dim]
  float* query_units;      // [heads * rows]: scale of the codes
  float* query_sums;       // [heads * rows, groups, padded to a multiple of 4]: sums of a group's codes
  float* scores;           // [heads * rows, 128], then weights
  float* scales;           // [groups, 128]: of a head's values
  float* minimums;         // likewise
  uint8_t* weights;        // [rows, groups, 2, 128]: low and high bytes of weights times scales
  float* weight_units;     // [rows, groups]: scale of these
  float* weight_minimums;  // [rows, groups]: sums of weights times minimums

  static int groups(int head_dim) { return head_dim / kQ4Group; }
  static int padded_groups(int head_dim) { return (groups(head_dim) + kGroupsAtOnce - 1) & ~(kGroupsAtOnce - 1); }
  static size_t floats(const paged_heads& heads) {
    Arena arena(nullptr);
    at(arena, heads);
    return arena.used() / sizeof(float);
  }
  static Q4Scratch at(Arena& arena, const paged_heads& heads) {
    const size_t rows = static_cast<size_t>(kSplitTokens) * (heads.num_heads / heads.num_kv_heads);
    const size_t all = rows * heads_together(heads), count = groups(heads.head_dim);
    Q4Scratch out{};
    out.queries = arena.take<float>(all * heads.head_dim);
    out.query_codes = arena.take<int8_t>(all * heads.head_dim);
    out.query_units = arena.take<float>(all);
    out.query_sums = arena.take<float>(all * padded_groups(heads.head_dim));
    out.scores = arena.take<float>(all * kSpan);
    out.scales = arena.take<float>(count * kSpan);
    out.minimums = arena.take<float>(count * kSpan);
    out.weights = arena.take<uint8_t>(rows * count * 2 * kSpan);
    out.weight_units = arena.take<float>(rows * count);
    out.weight_minimums = arena.take<float>(rows * count);
    return out;
  }
};

// Quantizes a row's query, and sums each group's codes. A unit of NaN propagates NaN and Inf.
inline void code_query(const float* query, int size, int8_t* codes, float& unit, float* sums) {
  Ints largest = zero_ints();
  for (int c = 0; c < size; c += 16) largest = max_magnitude(largest, load_floats(query + c));
  const auto bits = static_cast<uint32_t>(max_of(largest));
  unit = unit_of(bits);
  std::fill_n(sums, Q4Scratch::padded_groups(size), 0.0f);
  if (!(unit > 0.0f)) {
    __builtin_memset(codes, 0, size);
    return;
  }
  const Floats factor = broadcast(127.0f / from_bits(bits));
  for (int c = 0; c < size; c += kQ4Group) {
    const Ints low = to_nearest(mul(load_floats(query + c), factor));
    const Ints high = to_nearest(mul(load_floats(query + c + 16), factor));
    store_int8(codes + c, low);
    store_int8(codes + c + 16, high);
    sums[c / kQ4Group] = static_cast<float>(sum_of(add(low, high)));
  }
}

// The cached vectors of some tokens, of one KV head.
struct Q4Vectors {
  const uint8_t* data;
  const uint32_t* scales;
  int groups;

  Q4Vectors(const void* data, const void* scales, int head, int groups)
      : data(static_cast<const uint8_t*>(data) + static_cast<int64_t>(head) * groups * (kQ4Group / 2)),
        scales(static_cast<const uint32_t*>(scales) + static_cast<int64_t>(head) * groups),
        groups(groups) {}

  const uint8_t* codes(int64_t vector) const { return data + vector * groups * (kQ4Group / 2); }
  // Loads the scales and minimums of four vectors, `stride` entries of `vectors` apart, and of up to four groups from
  // `first` on: one vector per 128-bit lane, one group per lane of 32 bits.
  template <int kStride>
  __m512i parameters(const int64_t* vectors, int first) const {
    const auto there = static_cast<__mmask8>((1u << std::min(groups - first, kGroupsAtOnce)) - 1);
    const auto of = [&](int i) { return _mm_maskz_loadu_epi32(there, scales + vectors[i * kStride] * groups + first); };
    __m512i all = _mm512_castsi128_si512(of(0));
    all = _mm512_inserti32x4(all, of(1), 1);
    all = _mm512_inserti32x4(all, of(2), 2);
    return _mm512_inserti32x4(all, of(3), 3);
  }
};

// Loads 16 bytes each from four places.
inline __m512i load_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const auto load = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  __m512i all = _mm512_castsi128_si512(load(a));
  all = _mm512_inserti32x4(all, load(b), 1);
  all = _mm512_inserti32x4(all, load(c), 2);
  return _mm512_inserti32x4(all, load(d), 3);
}
inline __m512i lower_nibbles(__m512i a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline __m512i upper_nibbles(__m512i a) { return lower_nibbles(_mm512_srli_epi16(a, 4)); }
inline Floats scales_in(__m512i parameters) { return as_floats(_mm512_slli_epi32(parameters, 16)); }
inline Floats minimums_in(__m512i parameters) {
  return as_floats(_mm512_and_si512(parameters, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

// Returns the sums of the 128-bit lanes of a, then of b.
inline __m256 sum_lanes(Floats a, Floats b) {
  const Floats halves = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a, b, a, b in each lane
  const Floats sums = add(halves, _mm512_permute_ps(halves, 0x4e));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
}

// Scores eight keys for kRows rows, in units of the rows' query units.
template <int kRows>
[[gnu::noinline]] void score_q4(const Q4Vectors& keys, const int64_t* vectors, const int8_t* query, const float* sums,
                                float* scores, PrefetchQueue& shared) {
  PrefetchQueue ahead = shared;  // kept in registers
  const int groups = keys.groups, size = groups * kQ4Group;
  const int pitch = (groups + kGroupsAtOnce - 1) & ~(kGroupsAtOnce - 1);
  const uint8_t* codes[8];
  for (int i = 0; i < 8; ++i) codes[i] = keys.codes(vectors[i]);
  Floats totals[kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = zero_floats();
  for (int first = 0; first < groups; first += kGroupsAtOnce) {
    const __m512i parameters[2] = {keys.parameters<1>(vectors, first), keys.parameters<1>(vectors + 4, first)};
    const Floats minimums[2] = {minimums_in(parameters[0]), minimums_in(parameters[1])};
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats own = _mm512_broadcast_f32x4(_mm_loadu_ps(sums + r * pitch + first));
      for (int h = 0; h < 2; ++h) totals[r][h] = fma(minimums[h], own, totals[r][h]);
    }
    for (int g = first; g < std::min(first + kGroupsAtOnce, groups); ++g) {
      const __m512i place = _mm512_set1_epi32(g - first);
      __m512i low[2], high[2];
      Floats scales[2];
      for (int h = 0; h < 2; ++h) {
        const uint8_t* const* own = codes + 4 * h;
        const int at = g * (kQ4Group / 2);
        const __m512i four = load_four(own[0] + at, own[1] + at, own[2] + at, own[3] + at);
        low[h] = lower_nibbles(four);
        high[h] = upper_nibbles(four);
        scales[h] = scales_in(_mm512_castps_si512(_mm512_permutevar_ps(as_floats(parameters[h]), place)));
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const auto* own = reinterpret_cast<const __m128i*>(query + r * size + g * kQ4Group);
        const __m512i first_half = _mm512_broadcast_i32x4(_mm_loadu_si128(own));
        const __m512i second_half = _mm512_broadcast_i32x4(_mm_loadu_si128(own + 1));
        for (int h = 0; h < 2; ++h) {
          const __m512i products =
              _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero_ints(), low[h], first_half), high[h], second_half);
          totals[r][h] = fma(to_floats(products), scales[h], totals[r][h]);
        }
      }
    }
  }
  for (int i = 0; i < 8; ++i) ahead.fetch(size / 2);
  shared = ahead;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(scores + r * kSpan, sum_lanes(totals[r][0], totals[r][1]));
}

// Writes the scales and minimums of the values of keys [begin, end) of a span, multiples of 16.
inline void read_parameters(const Q4Vectors& values, const int64_t* vectors, int begin, int end, const Q4Scratch& out) {
  for (int i = begin; i < end; i += 16) {
    for (int first = 0; first < values.groups; first += kGroupsAtOnce) {
      __m512i lanes[4];  // lane l of lanes[k] is key 4 l + k
      for (int k = 0; k < 4; ++k) lanes[k] = values.parameters<4>(vectors + i + k, first);
      transpose_lanes(lanes);
      for (int g = first; g < std::min(first + kGroupsAtOnce, values.groups); ++g) {
        store_floats(out.scales + g * kSpan + i, scales_in(lanes[g - first]));
        store_floats(out.minimums + g * kSpan + i, minimums_in(lanes[g - first]));
      }
    }
  }
}

// Turns a row's weights of keys [begin, end) of a span, multiples of 16, into codes for one group of the values.
inline void code_row_weights(const float* weights, const float* scales, const float* minimums, int begin, int end,
                             uint8_t* codes, float& unit, float& weighted_minimum) {
  Floats scaled[kSpan / 16], most = zero_floats(), sum = zero_floats();
#pragma GCC unroll 8
  for (int i = 0; i < kSpan / 16; ++i) {
    scaled[i] = zero_floats();
    if (16 * i < begin || 16 * i >= end) continue;
    const Floats weight = load_floats(weights + 16 * i);
    scaled[i] = mul(weight, load_floats(scales + 16 * i));
    most = maximum(most, scaled[i]);
    sum = fma(weight, load_floats(minimums + 16 * i), sum);
  }
  const float largest = max_of(most);
  unit = largest / kMostWeight;
  weighted_minimum = sum_of(sum);  // NaN if a weight or a value is
  const Floats factor = broadcast(largest > 1e-30f ? kMostWeight / largest : 0.0f);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto pack = [&](int i) {
    return _mm512_packus_epi32(to_nearest(mul(scaled[i], factor)), to_nearest(mul(scaled[i + 1], factor)));
  };
#pragma GCC unroll 2
  for (int i = 0; i < kSpan / 16; i += 4) {  // 64 keys, four neighbours per lane of 32 bits
    if (16 * i >= end) break;
    const __m512i first = pack(i), second = pack(i + 2), byte = _mm512_set1_epi16(255);
    const __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, byte), _mm512_and_si512(second, byte));
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    _mm512_storeu_si512(codes + 16 * i, _mm512_permutexvar_epi32(order, low));
    _mm512_storeu_si512(codes + kSpan + 16 * i, _mm512_permutexvar_epi32(order, high));
  }
}

// Adds the weighted values of keys [begin, end) of a span, multiples of 4, to group g of kRows rows.
template <int kRows>
[[gnu::noinline]] void weigh_q4(const uint8_t* const* values, int begin, int end, int g, int groups,
                                const uint8_t* weights, const float* units, const float* minimums, float* out,
                                PrefetchQueue& shared) {
  PrefetchQueue ahead = shared;
  const int row_bytes = groups * 2 * kSpan, size = groups * kQ4Group;
  const int fetched = 4 * (g + 1) / groups - 4 * g / groups;  // of four vectors, while groups are processed
  const __m512i by_element = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i by_key = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  Ints sums[kRows][2][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h) sums[r][h][0] = sums[r][h][1] = zero_ints();
  values += begin;
  weights += g * 2 * kSpan;
  for (int i = begin; i < end; i += 4, values += 4) {
    const int at = g * (kQ4Group / 2);
    // A lane has the codes of four keys: of elements in a row, then of one element.
    const __m512i four = load_four(values[0] + at, values[1] + at, values[2] + at, values[3] + at);
    const __m512i codes = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_element, four), by_key);
    const __m512i halves[2] = {lower_nibbles(codes), upper_nibbles(codes)};
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      for (int byte = 0; byte < 2; ++byte) {
        const Ints weight = broadcast_shifted<0>(
            reinterpret_cast<const int32_t*>(weights + r * row_bytes + byte * kSpan + i));
        for (int h = 0; h < 2; ++h) sums[r][h][byte] = _mm512_dpbusd_epi32(sums[r][h][byte], weight, halves[h]);
      }
    }
    for (int k = 0; k < fetched; ++k) ahead.fetch(size / 2);
  }
  shared = ahead;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < 2; ++h) {
      float* to = out + r * size + g * kQ4Group + 16 * h;
      const Ints sum = add(sums[r][h][0], _mm512_slli_epi32(sums[r][h][1], 8));
      store_floats(to, fma(to_floats(sum), broadcast(units[r * groups + g]),
                           add(load_floats(to), broadcast(minimums[r * groups + g]))));
    }
  }
}

// Adds one span to the item's partial results, and prefetches `next` meanwhile.
inline void attend_q4_span(const RunItem& item, int first_key, const SpanKeys& span, const Q4Scratch& scratch,
                           float* partials, size_t partial_floats, const NextTokens& next) {
  const Pages& pages = item.pages;
  const paged_heads& heads = pages.heads;
  const int rows = item.tile.rows(), size = heads.head_dim, bytes = vector_bytes(heads);
  const int groups = Q4Scratch::groups(size), pitch = Q4Scratch::padded_groups(size);
  const auto [begin, end] = span;
  // Keys are processed in multiples of 16, padded with keys that a row sees, with weight zero: never with a page that
  // may belong to another sequence.
  const int first = begin & ~15, last = (end + 15) & ~15;
  int64_t vectors[kSpan];
  pages.vectors_of(first_key + begin, first_key + end, vectors + begin);
  std::fill(vectors + first, vectors + begin, vectors[begin]);
  std::fill(vectors + end, vectors + last, vectors[end - 1]);

  const uint8_t* tokens[2 * kSpan + kMostTokensAhead];
  const uint8_t** last_token = tokens;
  for (const void* data : {pages.cache.key, pages.cache.value})
    for (int i = begin; i < end; ++i) *last_token++ = static_cast<const uint8_t*>(data) + vectors[i] * bytes;
  last_token = std::copy(next.tokens, next.tokens + next.count, last_token);
  const int distance = std::min(tokens_ahead(heads, item.num_heads), end - begin);
  PrefetchQueue ahead{tokens + distance, last_token, 0, item.num_heads};
  for (int i = begin; i < end; ++i) prefetch_parameters(pages.cache.value_scale, vectors[i], groups, item.num_heads);

  const auto in_blocks = [&](int head, const auto& take) {
    in_row_blocks(rows, [&](int row, auto count) { take(head * rows + row, row, count); });
  };
  for (int key = begin & ~7; key < end; key += 8) {
    for (int head = 0; head < item.num_heads; ++head) {
      const Q4Vectors keys(pages.cache.key, pages.cache.key_scale, head, groups);
      in_blocks(head, [&](int at, int, auto count) {
        score_q4<decltype(count)::value>(keys, vectors + key, scratch.query_codes + at * size,
                                         scratch.query_sums + at * pitch, scratch.scores + at * kSpan + key, ahead);
      });
    }
  }
  for (int head = 0; head < item.num_heads; ++head) {
    const Partial out = Partial::at(partials + head * partial_floats, rows, size);
    const Q4Vectors values(pages.cache.value, pages.cache.value_scale, head, groups);
    const float* offset = pages.key_offset(first_key, head);
    read_parameters(values, vectors, first, last, scratch);
    for (int row = 0; row < rows; ++row) {
      const int position = item.tile.position_of(row), at = head * rows + row;
      float* scores = scratch.scores + at * kSpan;
      const float* query = scratch.queries + at * size;
      // weigh_row masks these scores, but needs them initialized.
      std::fill(scores, scores + begin, 0.0f);
      std::fill(scores + end, scores + last, 0.0f);
      const Floats unit = broadcast(scratch.query_units[at]);
      const Floats common =
          offset == nullptr ? zero_floats() : offset_score(offset, size, [&](int c) { return load_floats(query + c); });
      for (int i = first; i < last; i += 16) store_floats(scores + i, fma(load_floats(scores + i), unit, common));
      const int oldest = heads.window > 0 ? position - heads.window + 1 - first_key : 0;
      weigh_row(scores, last, std::max(oldest, begin), std::min(position + 1 - first_key, end), heads,
                out.maximum[row], out.sum[row], out.values + row * size,
                [&](int i, Floats weight) { store_floats(scores + i, weight); });
      for (int g = 0; g < groups; ++g)
        code_row_weights(scores, scratch.scales + g * kSpan, scratch.minimums + g * kSpan, first, last,
                         scratch.weights + (row * groups + g) * 2 * kSpan, scratch.weight_units[row * groups + g],
                         scratch.weight_minimums[row * groups + g]);
    }
    const uint8_t* places[kSpan];
    for (int i = first; i < last; ++i) places[i] = values.codes(vectors[i]);
    in_blocks(head, [&](int, int row, auto count) {
      for (int g = 0; g < groups; ++g)
        weigh_q4<decltype(count)::value>(places, begin & ~3, (end + 3) & ~3, g, groups,
                                         scratch.weights + row * groups * 2 * kSpan,
                                         scratch.weight_units + row * groups, scratch.weight_minimums + row * groups,
                                         out.values + row * size, ahead);
    });
  }
}

// Attends over the keys of an item that any row sees, with the scaled queries in scratch.queries. Writes one Partial
// per head, `partial_floats` apart, and prefetches `next_tokens` meanwhile.
inline void attend_few_q4(const RunItem& item, const Q4Scratch& scratch, float* partials, size_t partial_floats,
                          const NextTokens& next_tokens) {
  const int rows = item.tile.rows(), size = item.pages.heads.head_dim;
  for (int r = 0; r < item.num_heads * rows; ++r)
    code_query(scratch.queries + r * size, size, scratch.query_codes + r * size, scratch.query_units[r],
               scratch.query_sums + r * Q4Scratch::padded_groups(size));
  for (int head = 0; head < item.num_heads; ++head)
    Partial::at(partials + head * partial_floats, rows, size).clear(rows, size);
  for (int index = item.first; index < item.last; ++index) {
    const SpanKeys span(item.tile, item.pages.heads, index * kSpan);
    if (span.begin >= span.end) continue;
    NextTokens next;
    if (index + 1 < item.last) next.look_at({item.tile, item.pages, item.num_heads, index + 1, item.last});
    attend_q4_span(item, index * kSpan, span, scratch, partials, partial_floats, next.count > 0 ? next : next_tokens);
  }
}

#endif

}  // namespace
}  // namespace paged
