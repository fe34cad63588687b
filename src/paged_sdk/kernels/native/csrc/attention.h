// Attention of a tile of query rows over paged keys and values, read in place.
//
// Keys are processed in spans of 128, each in tiles of 64. A span gives (maximum, sum, weighted values); spans are
// merged in order into runs, and runs into the result. All of them start at fixed key positions, so a row's result
// depends neither on the batch, nor on how a prompt is cut into chunks, nor on how many threads share its runs. A
// span's keys may be stored minus a common offset vector; the row's dot product with that vector is added to all of the
// span's scores.
#pragma once

#include <algorithm>

#include "activations.h"
#include "dense.h"
#include "functions.h"
#include "q4.h"
#include "workspace.h"

namespace paged {
namespace {

constexpr int kKeyTile = 64;
constexpr int kSpan = 128;
constexpr float kMaskedScore = -1e30f;  // finite, so that the difference of two is 0 and not NaN

// Online-softmax state of some rows, scores in base 2: weights so far sum to `sum`, in units of 2^maximum; values
// [rows, head_dim] are in the same units.
struct Partial {
  float* maximum;
  float* sum;
  float* values;

  static size_t floats(int rows, int head_dim) { return static_cast<size_t>(rows) * (head_dim + 2); }
  static Partial at(float* memory, int rows, int head_dim) {
    return {memory + static_cast<size_t>(rows) * head_dim, memory + static_cast<size_t>(rows) * (head_dim + 1),
            memory};
  }
  void clear(int rows, int head_dim) const {
    for (int r = 0; r < rows; ++r) maximum[r] = kMaskedScore, sum[r] = 0.0f;
    __builtin_memset(values, 0, sizeof(float) * rows * head_dim);
  }
  // Merges the state of later keys.
  void merge(const Partial& other, int rows, int head_dim) const {
    for (int first = 0; first < rows; first += 16) {
      const int count = std::min(16, rows - first);
      alignas(64) float factors[16] = {}, others[16] = {};
      std::copy_n(maximum + first, count, factors);
      std::copy_n(other.maximum + first, count, others);
      const Floats own = load_floats(factors), theirs = load_floats(others), highest = paged::maximum(own, theirs);
      store_floats(factors, exponential2(sub(own, highest)));
      store_floats(others, exponential2(sub(theirs, highest)));
      for (int i = 0; i < count; ++i) {
        const int row = first + i;
        add_row(other, row, head_dim, factors[i], others[i]);
        maximum[row] = std::max(maximum[row], other.maximum[row]);
      }
    }
  }

 private:
  void add_row(const Partial& other, int row, int head_dim, float factor, float other_factor) const {
    const Floats mine = broadcast(factor), theirs = broadcast(other_factor);
    float* const to = values + static_cast<int64_t>(row) * head_dim;
    const float* const from = other.values + static_cast<int64_t>(row) * head_dim;
    for (int c = 0; c < head_dim; c += 16)
      store_floats(to + c, fma(theirs, load_floats(from + c), mul(mine, load_floats(to + c))));
    sum[row] = sum[row] * factor + other.sum[row] * other_factor;
  }
};

// A thread's scratch memory for a tile of query rows.
struct TileScratch {
  float* query;       // [rows, head_dim], scaled
  float* scores;      // [rows, 64]
  float* keys;        // [head_dim, 64]: transposed
  float* key_values;  // [64, head_dim]
  Partial span;

  static size_t floats(int rows, int head_dim) {
    Arena arena(nullptr);
    at(arena, rows, head_dim);
    return arena.used() / sizeof(float);
  }
  static TileScratch at(Arena& arena, int rows, int head_dim) {
    const size_t tile = static_cast<size_t>(kKeyTile) * head_dim;
    TileScratch out{};
    out.query = arena.take<float>(static_cast<size_t>(rows) * head_dim);
    out.scores = arena.take<float>(static_cast<size_t>(rows) * kKeyTile);
    out.keys = arena.take<float>(tile);
    out.key_values = arena.take<float>(tile);
    out.span = Partial::at(arena.take<float>(Partial::floats(rows, head_dim)), rows, head_dim);
    return out;
  }
};

// Element types of a cache: load reads 16 elements of a vector of `size` elements, from element c on. f8e4m3 elements
// are loaded in units of kUnit times their vector's scale, 4-bit codes with the scales and minimums of their groups.
struct CachedFloat32 {
  static constexpr int kBits = 32;
  static constexpr float kUnit = 0.0f;  // no scales of whole vectors
  static Floats load(const void* data, const void*, int64_t vector, int size, int c) {
    return load_floats(static_cast<const float*>(data) + vector * size + c);
  }
};
struct CachedBfloat16 {
  static constexpr int kBits = 16;
  static constexpr float kUnit = 0.0f;
  static Floats load(const void* data, const void*, int64_t vector, int size, int c) {
    return load_bfloat16(static_cast<const uint16_t*>(data) + vector * size + c);
  }
};
struct CachedFloat16 {
  static constexpr int kBits = 16;
  static constexpr float kUnit = 0.0f;
  static Floats load(const void* data, const void*, int64_t vector, int size, int c) {
    return load_half(static_cast<const uint8_t*>(data) + 2 * (vector * size + c));
  }
};
struct CachedFloat8 {
  static constexpr int kBits = 8;
  static constexpr float kUnit = 256.0f;
  static Floats load(const void* data, const void*, int64_t vector, int size, int c) {
    return load_float8(static_cast<const uint8_t*>(data) + vector * size + c);
  }
};
struct CachedQ4 {
  static constexpr int kBits = 4;
  static constexpr float kUnit = 0.0f;
  static Floats load(const void* data, const void* scales, int64_t vector, int size, int c) {
    return load_q4(data, scales, (vector * size + c) / kQ4Group, c % kQ4Group != 0);
  }
};

// Returns the bytes of a vector of `size` elements.
template <class Cached>
constexpr int bytes_of(int size) {
  return size * Cached::kBits / 8;
}

// Returns the factor of a cached vector's loaded elements, for types with kUnit.
template <class Cached>
inline float scale_of(const void* scales, int64_t vector) {
  return Cached::kUnit * static_cast<const float*>(scales)[vector];
}

// Loads 16 elements of a cached vector from element c on.
template <class Cached>
inline Floats load_cached(const void* data, const void* scales, int64_t vector, int size, int c) {
  const Floats v = Cached::load(data, scales, vector, size, c);
  if constexpr (Cached::kUnit == 0.0f) return v;
  return mul(v, broadcast(scale_of<Cached>(scales, vector)));
}

// Calls take(Cached{}) for a cache dtype.
template <class Take>
inline auto with_element(int32_t cache_dtype, const Take& take) {
  switch (cache_dtype) {
    case PAGED_FLOAT32:
      return take(CachedFloat32{});
    case PAGED_BFLOAT16:
      return take(CachedBfloat16{});
    case PAGED_FLOAT16:
      return take(CachedFloat16{});
    case PAGED_Q4:
      return take(CachedQ4{});
    default:
      return take(CachedFloat8{});
  }
}

// The pages of one sequence and KV head.
struct Pages {
  const paged_heads& heads;
  const paged_cache& cache;
  const int32_t* block_table;
  int kv_head;

  // Writes the vector indices of the tokens [begin, end), in units of head_dim elements.
  void vectors_of(int begin, int end, int64_t* out) const {
    int block = begin / heads.block_size, offset = begin % heads.block_size;
    for (int token = begin; token < end; offset = 0, ++block) {
      int64_t slot = static_cast<int64_t>(block_table[block]) * heads.block_size + offset;
      for (const int last = std::min(end, token + heads.block_size - offset); token < last; ++token, ++slot)
        *out++ = slot * heads.num_kv_heads + kv_head;
    }
  }
  // Returns the key offset of the span at `first_key` for KV head kv_head + head; null without offsets.
  const float* key_offset(int first_key, int head = 0) const {
    if (cache.key_offsets == nullptr) return nullptr;
    return cache.key_offsets +
           (static_cast<int64_t>(first_key / kSpan) * heads.num_kv_heads + kv_head + head) * heads.head_dim;
  }
  Floats load(const void* data, const void* scales, int64_t vector, int c) const {
    return with_element(heads.cache_dtype, [&](auto of) {
      return load_cached<decltype(of)>(data, scales, vector, heads.head_dim, c);
    });
  }
  // Loads keys begin ... end - 1 of the tile at `first`, transposed, and their values, both as float32. Positions
  // outside are zero and never read: pages outside the window may belong to another sequence by now.
  void load_tile(int first, int begin, int end, const TileScratch& out) const {
    int64_t vectors[kKeyTile];
    vectors_of(begin, end, vectors + begin - first);
    const auto is_there = [&](int i) { return i >= begin - first && i < end - first; };
    for (int half = 0; half < kKeyTile; half += 16) {
      for (int c = 0; c < heads.head_dim; c += 16) {
        Floats rows[16];
        for (int i = 0; i < 16; ++i)
          rows[i] = is_there(half + i) ? load(cache.key, cache.key_scale, vectors[half + i], c) : zero_floats();
        transpose(rows);
        for (int i = 0; i < 16; ++i) store_floats(out.keys + (c + i) * kKeyTile + half, rows[i]);
      }
    }
    for (int i = 0; i < end - first; ++i)
      for (int c = 0; c < heads.head_dim; c += 16)
        store_floats(out.key_values + i * heads.head_dim + c,
                     is_there(i) ? load(cache.value, cache.value_scale, vectors[i], c) : zero_floats());
  }
};

// Query tokens [first_position, first_position + num_tokens) of one sequence and KV head; row t * group + g.
struct QueryTile {
  int first_position;
  int num_tokens;
  int group;  // query heads per KV head
  // Keys that all tokens see bidirectionally, such as those of an image; none by default.
  int bidirectional_begin = 0, bidirectional_end = 0;
  // Bounds them by a symmetric window: each token sees this many keys from its own on; 0: unbounded.
  int reach = 0;

  int rows() const { return num_tokens * group; }
  int last_position() const { return first_position + num_tokens - 1; }
  int position_of(int row) const { return first_position + row / group; }
  // The token at a position sees keys [oldest_of, end_of).
  int end_of(int position) const {
    const int end = std::max(position + 1, bidirectional_end);
    return reach > 0 ? std::min(end, position + reach) : end;
  }
  int oldest_of(int position, int window) const {
    if (window <= 0) return 0;
    const int oldest = position - window + 1;
    return bidirectional_end > 0 && reach == 0 ? std::min(oldest, bidirectional_begin) : oldest;
  }
  int end() const { return end_of(last_position()); }
  // How many of the first keys of the span at first_key have to be processed for the token at a position, a multiple of
  // `multiple`, which is a power of two: keys after these have no weight. At most 0 if it sees none.
  int seen_width(int first_key, int position, int multiple) const {
    return (std::min(end_of(position) - first_key, kSpan) + multiple - 1) & ~(multiple - 1);
  }
};

// Returns a row's dot product with a span's key offset, which is added to each of the span's scores.
template <class Load>
inline Floats offset_score(const float* offset, int size, const Load& load_query) {
  Floats sum = zero_floats();
  for (int c = 0; c < size; c += 16) sum = fma(load_query(c), load_floats(offset + c), sum);
  return broadcast(sum_of(sum));
}

// Online-softmax update: turns a tile's scores into weights, in place, and rescales the span's state.
inline void update_softmax(const QueryTile& tile, int first_key, const paged_heads& heads, float* scores,
                           const Partial& span) {
  for (int r = 0; r < tile.rows(); ++r) {
    const int position = tile.position_of(r);
    const int oldest = tile.oldest_of(position, heads.window), end = tile.end_of(position);
    float* row = scores + r * kKeyTile;
    if (heads.softcap > 0.0f)
      for (int i = 0; i < kKeyTile; i += 16)
        store_floats(row + i, mul(broadcast(kLog2E), soft_cap(load_floats(row + i), heads.softcap)));
    if (first_key + kKeyTile > end || first_key < oldest)
      for (int i = 0; i < kKeyTile; ++i)
        if (first_key + i >= end || first_key + i < oldest) row[i] = 2.0f * kMaskedScore;
    Floats s[kKeyTile / 16], most = load_floats(row);
    for (int i = 0; i < kKeyTile / 16; ++i) {
      s[i] = load_floats(row + 16 * i);
      most = maximum(most, s[i]);
    }
    const float before = span.maximum[r], here = max_of(most);
    const float highest = here > before ? here : before;
    Floats total = zero_floats();
    for (int i = 0; i < kKeyTile / 16; ++i) {
      const Floats weight = exponential2(sub(s[i], broadcast(highest)));
      total = add(total, weight);
      store_floats(row + 16 * i, weight);
    }
    if (highest != before) {
      alignas(64) float factor[16];
      store_floats(factor, exponential2(broadcast(before - highest)));
      span.sum[r] *= factor[0];
      for (int c = 0; c < heads.head_dim; c += 16) {
        float* v = span.values + r * heads.head_dim + c;
        store_floats(v, mul(load_floats(v), load_floats(factor)));
      }
      span.maximum[r] = highest;
    }
    span.sum[r] += sum_of(total);
  }
}

// Adds a row's dot product with the tile's key offset to its scores.
inline void add_offset_score(const float* offset, const float* query, int size, float* scores) {
  const Floats common = offset_score(offset, size, [&](int c) { return load_floats(query + c); });
  for (int i = 0; i < kKeyTile; i += 16) store_floats(scores + i, add(load_floats(scores + i), common));
}

// Adds keys begin ... end - 1 of the tile at first_key to a span's state.
inline void attend_tile(const QueryTile& tile, const Pages& pages, int first_key, int begin, int end,
                        const TileScratch& scratch, const Partial& out) {
  const paged_heads& heads = pages.heads;
  const int rows = tile.rows(), size = heads.head_dim;
  const float* offset = pages.key_offset(first_key);
  pages.load_tile(first_key, begin, end, scratch);
  multiply_dense<FloatDot>(rows, scratch.query, size, scratch.keys, kKeyTile, size, scratch.scores, kKeyTile, kKeyTile,
                           false);
  for (int r = 0; offset != nullptr && r < rows; ++r)
    add_offset_score(offset, scratch.query + r * size, size, scratch.scores + r * kKeyTile);
  update_softmax(tile, first_key, heads, scratch.scores, out);
  multiply_dense<FloatDot>(rows, scratch.scores, kKeyTile, scratch.key_values, size, end - first_key, out.values, size,
                           size, true);
}

// Attends over the keys of one span, [first_key, first_key + 128), that any row sees; writes `out`.
inline void attend_span(const QueryTile& tile, const Pages& pages, int first_key, const TileScratch& scratch,
                        const Partial& out) {
  const int end_seen = tile.end(), oldest = tile.oldest_of(tile.first_position, pages.heads.window);
  out.clear(tile.rows(), pages.heads.head_dim);
  for (int key = first_key; key < first_key + kSpan && key < end_seen; key += kKeyTile) {
    if (key + kKeyTile <= oldest) continue;
    attend_tile(tile, pages, key, std::max(key, oldest), std::min(key + kKeyTile, end_seen), scratch, out);
  }
}

// Attends over the spans that start at keys first_key ... end_key - 1; writes `out`.
inline void attend_run(const QueryTile& tile, const Pages& pages, int first_key, int end_key,
                       const TileScratch& scratch, const Partial& out) {
  out.clear(tile.rows(), pages.heads.head_dim);
  for (int key = first_key; key < std::min(end_key, tile.end()); key += kSpan) {
    attend_span(tile, pages, key, scratch, scratch.span);
    out.merge(scratch.span, tile.rows(), pages.heads.head_dim);
  }
}

}  // namespace
}  // namespace paged
