// Divides the tokens of a row into those that its state goes through and drafts, whose inputs are kept: a state cannot
// go back to before a token, but it can go on once it is known that the token is right.
#pragma once

#include <cstring>

#include "activations.h"
#include "functions.h"

namespace paged {
namespace {

// The state of a row goes through the first `replayed` tokens that its slot keeps, then through those of the step from
// `begin` to `known_end`. A copy goes through the first `earlier` drafts that the slot keeps, then through those of the
// step, up to `end`.
struct RowTokens {
  int64_t replayed, earlier, begin, known_end, end;
};

inline RowTokens tokens_of(const paged_recurrent_rows& rows, int64_t row) {
  const int64_t begin = rows.first_tokens[row], end = rows.first_tokens[row + 1];
  if (rows.num_drafts == nullptr) return {0, 0, begin, end, end};
  return {rows.num_replayed[row], rows.num_earlier[row], begin, end - rows.num_drafts[row], end};
}

// What a rule of recurrent layers reads of tokens: two groups of columns, side by side where they are kept.
struct RuleInputs {
  Matrix inputs, rates;
  int num_inputs, num_rates;
};

inline RuleInputs kept_inputs(const RuleInputs& like, float* kept, int most_drafts, int64_t slot) {
  const int64_t width = like.num_inputs + like.num_rates;
  float* const own = kept + slot * most_drafts * width;
  return {{own, width, PAGED_FLOAT32}, {own + like.num_inputs, width, PAGED_FLOAT32}, like.num_inputs, like.num_rates};
}

inline void load_vector(const Matrix& from, int64_t row, int64_t col, int size, float* out) {
  int c = 0;
  for (; c + 16 <= size; c += 16) store_floats(out + c, from.load(row, col + c));
  for (; c < size; ++c) out[c] = from.at(row, col + c);
}

// Keeps the inputs of a row's drafts, behind those that they follow, in the place of older ones.
inline void keep_drafts(const paged_recurrent_rows& rows, int64_t row, const RuleInputs& x, float* kept,
                        int most_drafts) {
  const RowTokens tokens = tokens_of(rows, row);
  float* out = kept + (rows.slots[row] * most_drafts + tokens.earlier) * (x.num_inputs + x.num_rates);
  for (int64_t t = tokens.known_end; t < tokens.end; ++t) {
    load_vector(x.inputs, t, 0, x.num_inputs, out);
    load_vector(x.rates, t, 0, x.num_rates, out + x.num_inputs);
    out += x.num_inputs + x.num_rates;
  }
}

// Takes a head's state through the tokens of a row.
//
// `size`: of the state
// `take(inputs, first, end, state, is_read)`: takes a state through some tokens; `is_read`: they are of the step
template <class Args, class Take>
inline void take_through(const Args& args, int64_t row, const RuleInputs& x, float* state, int64_t size, int thread,
                         const Take& take) {
  const RowTokens own = tokens_of(args.rows, row);
  const auto take_kept = [&](int64_t count, float* from) {
    if (count > 0) take(kept_inputs(x, args.kept, args.most_drafts, args.rows.slots[row]), 0, count, from, false);
  };
  if (args.rows.is_new[row] != 0) std::memset(state, 0, sizeof(float) * size);
  take_kept(own.replayed, state);
  take(x, own.begin, own.known_end, state, true);
  if (own.known_end == own.end) return;
  float* const guessed = args.rows.guessed + thread * kMostState;
  std::memcpy(guessed, state, sizeof(float) * size);
  take_kept(own.earlier, guessed);
  take(x, own.known_end, own.end, guessed, true);
}

}  // namespace
}  // namespace paged
