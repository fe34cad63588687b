// Computes Mamba-2's selective state space (Dao and Gu, 2024, arXiv 2405.21060) token by token, so that a token's
// result depends neither on how its sequence was cut nor on the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "draft_inputs.h"
#include "functions.h"
#include "linear.h"
#include "pool.h"

namespace paged {
namespace {

constexpr int kScanTokens = 16;  // tokens that share one visit of a state's rows
constexpr int kScanRows = 4;     // rows of a state that stay in registers during a visit
constexpr int kMostStateSize = 256;
constexpr int kMostScanDim = 256;

// A few tokens of a head.
struct ScanTokens {
  alignas(64) float b[kScanTokens][kMostStateSize];
  alignas(64) float c[kScanTokens][kMostStateSize];
  alignas(64) float x[kScanTokens][kMostScanDim];
  alignas(64) float read[kScanTokens][kMostScanDim];
  float decay[kScanTokens];
  float step[kScanTokens];
};

inline RuleInputs inputs_of(const paged_mamba2_args& args) {
  return {{args.inputs, args.inputs_stride, args.dtype},
          {args.steps, args.steps_stride, args.dtype},
          args.heads * args.head_dim + 2 * args.groups * args.state_size,
          args.heads};
}

inline void load_tokens(const paged_mamba2_args& args, const RuleInputs& x, int64_t begin, int count, int head,
                        ScanTokens& out) {
  const Matrix &inputs = x.inputs, &steps = x.rates;
  const int64_t width = int64_t{args.heads} * args.head_dim, group = head / (args.heads / args.groups);
  const int size = args.state_size;
  for (int t = 0; t < count; ++t) {
    load_vector(inputs, begin + t, int64_t{head} * args.head_dim, args.head_dim, out.x[t]);
    load_vector(inputs, begin + t, width + group * size, size, out.b[t]);
    load_vector(inputs, begin + t, width + (args.groups + group) * size, size, out.c[t]);
    out.step[t] = softplus(steps.at(begin + t, head) + args.step_bias[head]);
    out.decay[t] = std::exp(-args.rate[head] * out.step[t]);
  }
}

// Takes kScanRows rows of 16 * kVectors columns of a state through the tokens, and adds what they read of them.
template <int kVectors>
inline void scan_rows(ScanTokens& tokens, int count, int row, int col, float* state, int head_dim) {
  Floats s[kScanRows][kVectors];
  for (int r = 0; r < kScanRows; ++r)
    for (int v = 0; v < kVectors; ++v) s[r][v] = load_floats(state + static_cast<int64_t>(row + r) * head_dim + 16 * v);
  for (int t = 0; t < count; ++t) {
    const Floats decay = broadcast(tokens.decay[t]), step = broadcast(tokens.step[t]);
    float* const read = tokens.read[t] + col;
    Floats written[kVectors], sums[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      written[v] = mul(step, load_floats(tokens.x[t] + col + 16 * v));
      sums[v] = load_floats(read + 16 * v);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kScanRows; ++r) {
      const Floats b = broadcast(tokens.b[t][row + r]), c = broadcast(tokens.c[t][row + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        s[r][v] = fma(b, written[v], mul(decay, s[r][v]));
        sums[v] = fma(c, s[r][v], sums[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) store_floats(read + 16 * v, sums[v]);
  }
  for (int r = 0; r < kScanRows; ++r)
    for (int v = 0; v < kVectors; ++v) store_floats(state + static_cast<int64_t>(row + r) * head_dim + 16 * v, s[r][v]);
}

// Takes the state of a head through some tokens, and writes what they read of it, with the skip connection, to rows of
// `read`; null: it is not needed.
inline void scan_tokens(const paged_mamba2_args& args, const RuleInputs& x, int64_t first, int64_t end, int head,
                        float* state, float* read) {
  ScanTokens tokens;
  const int dim = args.head_dim;
  const int64_t width = int64_t{args.heads} * dim;
  const Floats skip = broadcast(args.skip[head]);
  for (int64_t begin = first; begin < end; begin += kScanTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kScanTokens, end - begin));
    load_tokens(args, x, begin, count, head, tokens);
    for (int t = 0; t < count; ++t)
      for (int c = 0; c < dim; c += 16) store_floats(tokens.read[t] + c, mul(skip, load_floats(tokens.x[t] + c)));
    for (int n = 0; n < args.state_size; n += kScanRows) {
      int col = 0;
      for (; col + 32 <= dim; col += 32) scan_rows<2>(tokens, count, n, col, state + col, dim);
      if (col < dim) scan_rows<1>(tokens, count, n, col, state + col, dim);
    }
    if (read == nullptr) continue;
    for (int t = 0; t < count; ++t)
      std::memcpy(read + (begin + t) * width + int64_t{head} * dim, tokens.read[t], sizeof(float) * dim);
  }
}

// Computes what the tokens of a row read of one head's state.
inline void scan_head(const paged_mamba2_args& args, int64_t row, int head, int thread) {
  const int64_t size = int64_t{args.state_size} * args.head_dim;
  float* const state = args.pool + (args.rows.slots[row] * args.heads + head) * size;
  take_through(args, row, inputs_of(args), state, size, thread,
               [&](const RuleInputs& x, int64_t first, int64_t end, float* through, bool is_read) {
                 scan_tokens(args, x, first, end, head, through, is_read ? args.read : nullptr);
               });
}

// Gates and normalizes `norm_size` columns of a token, from `col` on.
inline void gate_columns_of(const paged_mamba2_args& args, int64_t token, int64_t col) {
  const int64_t width = int64_t{args.heads} * args.head_dim;
  const Matrix gates{args.gates, args.gates_stride, args.dtype};
  const Output out{args.out, width, args.dtype, {}};
  float* const read = args.read + token * width + col;
  const bool has_norm = args.norm_weight != nullptr;
  if (has_norm && args.gate_first == 0) normalize(read, args.norm_size, args.norm_weight + col, args.norm_eps);
  for (int c = 0; c < args.norm_size; c += 16)
    store_floats(read + c, mul(load_floats(read + c), activate(gates.load(token, col + c), PAGED_SILU)));
  if (has_norm && args.gate_first != 0) normalize(read, args.norm_size, args.norm_weight + col, args.norm_eps);
  for (int c = 0; c < args.norm_size; c += 16) out.store(token, col + c, load_floats(read + c));
}

// Cost of a token and head, in byte multiply-adds (pool.h): some 1 us at 64 columns of 128 rows.
inline int64_t scan_cost(const paged_mamba2_args& args) { return int64_t{30} * args.state_size * args.head_dim; }

// Computes all rows of a step.
inline Task scan(Job& job, const paged_mamba2_args args) {
  const int64_t heads = args.heads, rows = args.rows.num_rows, tokens = args.rows.first_tokens[rows];
  co_await job.phase(rows * heads, tokens * scan_cost(args) / rows, [&](int64_t first, int64_t last, int thread) {
    for (int64_t i = first; i < last; ++i) scan_head(args, i / heads, static_cast<int>(i % heads), thread);
  });
  if (args.rows.num_drafts != nullptr) {
    const RuleInputs x = inputs_of(args);
    co_await job.phase(rows, 2 * row_cost(x.num_inputs), [&](int64_t first, int64_t last, int) {
      for (int64_t row = first; row < last; ++row) keep_drafts(args.rows, row, x, args.kept, args.most_drafts);
    });
  }
  const int64_t parts = heads * args.head_dim / args.norm_size;
  co_await job.phase(tokens * parts, 3 * row_cost(args.norm_size), [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) gate_columns_of(args, i / parts, i % parts * args.norm_size);
  });
}

}  // namespace
}  // namespace paged
