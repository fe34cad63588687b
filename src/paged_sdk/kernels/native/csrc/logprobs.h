// Computes the logprobs of chosen tokens and of the likeliest ones of a row of logits (paged_logprobs_args).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "abi_sampling.h"
#include "functions.h"
#include "row_groups.h"
#include "workspace.h"

namespace paged {
namespace {

// The logprob of a logit is (logit - largest) - log_sum: the difference of two floats is exact in double.
struct LogNormalizer {
  double largest;
  double log_sum;  // of e^(logit - largest)

  double logprob_of(float logit) const { return (logit - largest) - log_sum; }
};

struct LikelyToken {
  float logit;
  int32_t token;
};

struct LogprobScratch {
  float* maxima;  // of each group
  float* sorted;  // a copy of them
  LikelyToken* likely;

  static LogprobScratch at(Arena& arena, int vocab_size) {
    LogprobScratch out{};
    for (float** each : {&out.maxima, &out.sorted}) *each = arena.take<float>(RowGroups::count_of(vocab_size));
    out.likely = arena.take<LikelyToken>(static_cast<size_t>(vocab_size));
    return out;
  }
  static size_t bytes(int vocab_size) {
    Arena arena(nullptr);
    at(arena, vocab_size);
    return arena.used();
  }
};

// Sums in float32 within a group and in double beyond. The largest logit's weight is exactly 1, so the logarithm is not
// negative, nor is a logprob positive.
inline double log_of_sum(const RowGroups& groups, float largest) {
  double total = 0.0;
  for (int g = 0; g < groups.count(); ++g) {
    Floats sum = zero_floats();
    for (int col = g * RowGroups::kSize; col < groups.end_of(g); col += 16)
      sum = add(sum, exponential(sub(groups.load(col), broadcast(largest))));
    total += sum_of(sum);
  }
  return std::log(total);
}

// Moves the `count` likeliest tokens to the front of the scratch, in order.
inline void find_likeliest(const RowGroups& groups, int vocab_size, int count, const LogprobScratch& scratch) {
  const float least = groups.reached_by(count, scratch.sorted);
  LikelyToken* end = scratch.likely;
  groups.visit(least, [&](int first, Floats own) {
    alignas(64) float logits[16];
    store_floats(logits, own);
    const int held = std::min(16, vocab_size - first);  // beyond the row's end there are more of -inf
    for (int i = 0; i < held; ++i)
      if (logits[i] >= least) *end++ = {logits[i], first + i};
  });
  std::partial_sort(scratch.likely, scratch.likely + count, end, IsLikelier{});
}

// Writes the likeliest tokens of a row and their logprobs, and returns what those of its other tokens follow from.
inline LogNormalizer find_logprobs(const paged_logprobs_args& args, int64_t row, const LogprobScratch& scratch) {
  RowGroups groups(args.logits + row * args.stride, args.vocab_size, scratch.maxima);
  const float largest = groups.find_maxima();
  int64_t* const tokens = args.top_tokens + row * args.top_n;
  double* const logprobs = args.top_logprobs + row * args.top_n;
  if (!std::isfinite(largest)) {
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    for (int i = 0; i < args.top_n; ++i) tokens[i] = i, logprobs[i] = kNaN;
    return {kNaN, kNaN};
  }
  const LogNormalizer found{largest, log_of_sum(groups, largest)};
  if (args.top_n > 0) find_likeliest(groups, args.vocab_size, args.top_n, scratch);
  for (int i = 0; i < args.top_n; ++i) {
    tokens[i] = scratch.likely[i].token;
    logprobs[i] = found.logprob_of(scratch.likely[i].logit);
  }
  return found;
}

// Cost of a row, in byte multiply-adds (pool.h): 0.5 ns per logit.
inline int64_t logprobs_cost(int vocab_size) { return int64_t{250} * vocab_size; }

}  // namespace
}  // namespace paged
