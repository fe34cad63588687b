// Applies the gated delta rule (Yang et al., 2024, arXiv 2412.06464) token by token, so that a token's result depends
// neither on how its sequence was cut nor on the other rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "draft_inputs.h"
#include "functions.h"
#include "linear.h"
#include "pool.h"

namespace paged {
namespace {

constexpr int kDeltaTokens = 16;  // tokens that share one visit of a state's columns
constexpr int kMostDeltaDim = 256;
constexpr int kDeltaSums = 4;  // sums over every fourth key: fewer would wait for each other
constexpr float kUnitEps = 1e-6f;

// A few tokens of a head.
struct DeltaTokens {
  alignas(64) float query[kDeltaTokens][kMostDeltaDim];
  alignas(64) float key[kDeltaTokens][kMostDeltaDim];
  alignas(64) float read[kDeltaTokens][kMostDeltaDim];
  float decay[kDeltaTokens];
  float strength[kDeltaTokens];
};

// Writes a vector of `size` columns, scaled to the given length.
inline void load_scaled(const Matrix& x, int64_t row, int64_t col, int size, float length, float* out) {
  Floats squares = zero_floats();
  for (int c = 0; c < size; c += 16) {
    const Floats v = x.load(row, col + c);
    squares = fma(v, v, squares);
    store_floats(out + c, v);
  }
  const Floats factor = broadcast(length / std::sqrt(sum_of(squares) + kUnitEps));
  for (int c = 0; c < size; c += 16) store_floats(out + c, mul(load_floats(out + c), factor));
}

inline RuleInputs inputs_of(const paged_gated_delta_args& args) {
  return {{args.inputs, args.inputs_stride, args.dtype},
          {args.rates, args.rates_stride, args.dtype},
          2 * args.key_heads * args.key_dim + args.value_heads * args.value_dim,
          2 * args.value_heads};
}

inline void load_tokens(const paged_gated_delta_args& args, const RuleInputs& x, int64_t begin, int count, int head,
                        DeltaTokens& out) {
  const Matrix &inputs = x.inputs, &rates = x.rates;
  const int dim = args.key_dim, source = head / (args.value_heads / args.key_heads);
  const float query_length = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int t = 0; t < count; ++t) {
    load_scaled(inputs, begin + t, int64_t{source} * dim, dim, query_length, out.query[t]);
    load_scaled(inputs, begin + t, (int64_t{args.key_heads} + source) * dim, dim, 1.0f, out.key[t]);
    out.strength[t] = 1.0f / (1.0f + std::exp(-rates.at(begin + t, head)));
    const float step = softplus(rates.at(begin + t, args.value_heads + head) + args.step_bias[head]);
    out.decay[t] = std::exp(-args.rate[head] * step);
  }
}

template <int kVectors>
inline void sum_up(const Floats (&sums)[kDeltaSums][kVectors], Floats (&out)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) out[v] = add(add(sums[0][v], sums[1][v]), add(sums[2][v], sums[3][v]));
}

// Updates 16 * kVectors columns of a state by a token, and reads them: 16 KB at 128 keys, which stay in the first
// cache.
template <int kVectors>
inline void update_columns(const float* query, const float* key, float decay, float strength, const Floats* value,
                           float* state, int key_dim, int value_dim, float* read) {
  Floats sums[kDeltaSums][kVectors], change[kVectors];
  for (auto& each : sums)
    for (Floats& sum : each) sum = zero_floats();
  for (int i = 0; i < key_dim; i += kDeltaSums) {
#pragma GCC unroll 4
    for (int s = 0; s < kDeltaSums; ++s) {
      const Floats k = broadcast(key[i + s]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sums[s][v] = fma(k, load_floats(state + static_cast<int64_t>(i + s) * value_dim + 16 * v), sums[s][v]);
    }
  }
  sum_up<kVectors>(sums, change);
  const Floats remains = broadcast(decay);
  for (int v = 0; v < kVectors; ++v)
    change[v] = mul(broadcast(strength), sub(value[v], mul(remains, change[v])));
  for (auto& each : sums)
    for (Floats& sum : each) sum = zero_floats();
  for (int i = 0; i < key_dim; i += kDeltaSums) {
#pragma GCC unroll 4
    for (int s = 0; s < kDeltaSums; ++s) {
      const Floats k = broadcast(key[i + s]), q = broadcast(query[i + s]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* const at = state + static_cast<int64_t>(i + s) * value_dim + 16 * v;
        const Floats next = fma(k, change[v], mul(remains, load_floats(at)));
        store_floats(at, next);
        sums[s][v] = fma(q, next, sums[s][v]);
      }
    }
  }
  sum_up<kVectors>(sums, change);
  for (int v = 0; v < kVectors; ++v) store_floats(read + 16 * v, change[v]);
}

template <int kVectors>
inline void update_all(const paged_gated_delta_args& args, const Matrix& inputs, int64_t begin, int count,
                       int64_t value_col, int col, float* state, DeltaTokens& tokens) {
  for (int t = 0; t < count; ++t) {
    Floats value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = inputs.load(begin + t, value_col + col + 16 * v);
    update_columns<kVectors>(tokens.query[t], tokens.key[t], tokens.decay[t], tokens.strength[t], value, state + col,
                             args.key_dim, args.value_dim, tokens.read[t] + col);
  }
}

// Takes the state of a head through some tokens, and calls `use` with what up to kDeltaTokens of them read.
template <class Use>
inline void apply_to(const paged_gated_delta_args& args, const RuleInputs& x, int64_t first, int64_t end, int head,
                     float* state, const Use& use) {
  DeltaTokens tokens;
  const int dim = args.value_dim;
  const int64_t value_col = int64_t{2} * args.key_heads * args.key_dim + int64_t{head} * dim;
  for (int64_t begin = first; begin < end; begin += kDeltaTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kDeltaTokens, end - begin));
    load_tokens(args, x, begin, count, head, tokens);
    int col = 0;
    for (; col + 32 <= dim; col += 32) update_all<2>(args, x.inputs, begin, count, value_col, col, state, tokens);
    if (col < dim) update_all<1>(args, x.inputs, begin, count, value_col, col, state, tokens);
    use(begin, count, tokens);
  }
}

// Applies the rule to the tokens of a row, for one head.
inline void apply_delta_rule(const paged_gated_delta_args& args, int64_t row, int head, int thread) {
  const int dim = args.value_dim;
  const int64_t size = int64_t{args.key_dim} * dim;
  const Matrix gates{args.gates, args.gates_stride, args.dtype};
  const Output out{args.out, int64_t{args.value_heads} * dim, args.dtype, {}};
  const auto gate = [&](int64_t begin, int count, DeltaTokens& tokens) {
    for (int t = 0; t < count; ++t) {
      normalize(tokens.read[t], dim, args.norm_weight, args.norm_eps);
      for (int c = 0; c < dim; c += 16) {
        const int64_t at = int64_t{head} * dim + c;
        out.store(begin + t, at, mul(load_floats(tokens.read[t] + c), activate(gates.load(begin + t, at), PAGED_SILU)));
      }
    }
  };
  float* const state = args.pool + (args.rows.slots[row] * args.value_heads + head) * size;
  take_through(args, row, inputs_of(args), state, size, thread,
               [&](const RuleInputs& x, int64_t first, int64_t end, float* through, bool is_read) {
                 apply_to(args, x, first, end, head, through, [&](int64_t begin, int count, DeltaTokens& tokens) {
                   if (is_read) gate(begin, count, tokens);
                 });
               });
}

// Cost of a token and head, in byte multiply-adds (pool.h): some 2 us at 128 keys and values.
inline int64_t delta_cost(const paged_gated_delta_args& args) { return int64_t{40} * args.key_dim * args.value_dim; }

// Computes all rows of a step.
inline Task apply_gated_delta(Job& job, const paged_gated_delta_args args) {
  const int64_t heads = args.value_heads, rows = args.rows.num_rows;
  const int64_t cost = args.rows.first_tokens[rows] * delta_cost(args) / rows;
  co_await job.phase(rows * heads, cost, [&](int64_t first, int64_t last, int thread) {
    for (int64_t i = first; i < last; ++i) apply_delta_rule(args, i / heads, static_cast<int>(i % heads), thread);
  });
  if (args.rows.num_drafts == nullptr) co_return;
  const RuleInputs x = inputs_of(args);
  co_await job.phase(rows, 2 * row_cost(x.num_inputs), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) keep_drafts(args.rows, row, x, args.kept, args.most_drafts);
  });
}

}  // namespace
}  // namespace paged
