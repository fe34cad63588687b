// Makes what decoder layers need of a step's tokens: their embeddings, and the cosines and sines of their positions,
// with the factors of queries there.
//
// Callers could make both before the call, but between two steps the weights of one have replaced in the caches what
// the other needs: for one token of SmolLM2, torch's operations took 300 us of a step's 4,300 (AMD Zen 4).
#pragma once

#include <cmath>

#include "activations.h"
#include "rows.h"
#include "workspace.h"

namespace paged {
namespace {

// Computes cosine and sine of an angle, in doubles: series around the nearest multiple of pi / 2, rounded to float32
// once. For angles of up to a million radians they are off by 1e-10 at most, so nearly all are rounded correctly.
inline void turn(float angle, float& cosine, float& sine) {
  constexpr double kQuarters = 0.6366197723675814;  // 2 / pi
  constexpr double kQuarter = 1.5707963267948966, kRest = 6.123233995736766e-17;  // their sum is pi / 2
  constexpr double kRounding = 0x1.8p52;  // adding it leaves an integer in a double's low bits
  const double shifted = angle * kQuarters + kRounding;
  int64_t quarters;
  __builtin_memcpy(&quarters, &shifted, sizeof quarters);
  const double whole = shifted - kRounding, x = angle - whole * kQuarter - whole * kRest, z = x * x;
  double s = 1.0, c = 1.0;
  for (int n = 12; n > 0; n -= 2) {
    s = 1.0 - z * (1.0 / (n * (n + 1))) * s;
    c = 1.0 - z * (1.0 / (n * (n - 1))) * c;
  }
  s *= x;
  const bool swapped = (quarters & 1) != 0;
  const double along = swapped ? s : c, across = swapped ? c : s;
  cosine = static_cast<float>(((quarters + 1) & 2) != 0 ? -along : along);
  sine = static_cast<float>((quarters & 2) != 0 ? -across : across);
}

// Whether the call makes this rotary embedding's cosines and sines.
inline bool is_made(const paged_rope& rope) { return rope.cosines == nullptr; }

// Whether it makes factors of queries beside them.
inline bool makes_scales(const paged_rope& rope) { return is_made(rope) && rope.query_scale_beta != 0.0f; }

// Returns the factor of queries at a position: Llama 4's temperature of attention. The logarithm is rounded once.
inline float query_scale(const paged_rope& rope, int64_t position) {
  const auto lengths = static_cast<double>(position / rope.query_scale_length);
  return 1.0f + rope.query_scale_beta * static_cast<float>(std::log1p(lengths));
}

// The rotary embeddings of a step, and memory for the cosines, sines and factors of queries that are made.
struct StepRopes {
  paged_rope* ropes;  // [num_ropes]
  float* angles;      // of each that is made: cosines, then sines, [num_rows, half]; then factors, [num_rows], if any

  static StepRopes at(Arena& arena, const paged_decoder_args& args) {
    size_t numbers = 0;
    for (int i = 0; i < args.num_ropes; ++i) numbers += numbers_of(args, i);
    paged_rope* const ropes = arena.take<paged_rope>(args.num_ropes);
    return {ropes, arena.take<float>(numbers)};
  }
  static size_t bytes(const paged_decoder_args& args) {
    Arena arena(nullptr);
    at(arena, args);
    return arena.used();
  }

  // Returns the step with these rotary embeddings.
  paged_decoder_args of(const paged_decoder_args& args) const {
    const float* made = angles;
    for (int i = 0; i < args.num_ropes; ++i) {
      ropes[i] = args.ropes[i];
      if (!is_made(args.ropes[i])) continue;
      ropes[i].cosines = made;
      ropes[i].sines = made + count(args, i);
      if (makes_scales(args.ropes[i])) ropes[i].query_scales = made + 2 * count(args, i);
      made += numbers_of(args, i);
    }
    paged_decoder_args out = args;
    out.ropes = ropes;
    return out;
  }

  // Returns the cost of a row's cosines and sines, at 10 ns a pair.
  static int64_t cost(const paged_decoder_args& args) {
    int64_t pairs = 0;
    for (int i = 0; i < args.num_ropes; ++i) pairs += is_made(args.ropes[i]) ? args.ropes[i].half : 0;
    return 5000 * pairs;
  }

  // Writes the cosines and sines of a row, and the factor of its queries.
  void turn_row(const paged_decoder_args& args, int64_t row) const {
    float* made = angles;
    for (int i = 0; i < args.num_ropes; ++i) {
      const paged_rope& rope = args.ropes[i];
      if (!is_made(rope)) continue;
      float *const cosines = made + row * rope.half, *const sines = cosines + count(args, i);
      const auto position = static_cast<float>(args.positions[row]);
      for (int f = 0; f < rope.half; ++f) turn(position * rope.frequencies[f], cosines[f], sines[f]);
      if (rope.factor != 1.0f)
        for (int f = 0; f < rope.half; ++f) cosines[f] *= rope.factor, sines[f] *= rope.factor;
      if (makes_scales(rope)) made[2 * count(args, i) + row] = query_scale(rope, args.positions[row]);
      made += numbers_of(args, i);
    }
  }

 private:
  // Returns how many numbers are made for a rotary embedding.
  static size_t numbers_of(const paged_decoder_args& args, int i) {
    if (!is_made(args.ropes[i])) return 0;
    return 2 * count(args, i) + (makes_scales(args.ropes[i]) ? args.num_rows : 0);
  }
  static size_t count(const paged_decoder_args& args, int i) {
    return static_cast<size_t>(args.num_rows) * args.ropes[i].half;
  }
};

// Whether a token has no row in the embedding.
inline bool has_unknown_token(const paged_decoder_args& args) {
  if (args.token_ids == nullptr) return false;
  for (int64_t row = 0; row < args.num_rows; ++row)
    if (args.token_ids[row] < 0 || args.token_ids[row] >= args.embedding.rows) return true;
  return false;
}

// Writes a row's embedding.
inline void embed_row(const paged_decoder_args& args, int64_t row) {
  const int cols = args.embedding.cols;
  float* const out = args.hidden + row * cols;
  decode_row(args.embedding, args.token_ids[row], out);
  for (int c = 0; c < cols; ++c) out[c] = out[c] * args.embedding_scale * args.stream_scale;
}

// Makes embeddings and rotary embeddings, as far as the caller has not given them.
//
// Looking up a row takes 10 us, nearly all of it waiting for memory: a row has 4 bytes in each of its panel's vectors.
inline auto make_inputs(Job& job, const paged_decoder_args& args, const StepRopes& ropes) {
  const int64_t cost = StepRopes::cost(args) + (args.token_ids == nullptr ? 0 : 10 * row_cost(args.embedding.cols));
  return job.phase(args.num_rows, cost, [&args, &ropes](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      if (args.token_ids != nullptr) embed_row(args, row);
      ropes.turn_row(args, row);
    }
  });
}

}  // namespace
}  // namespace paged
