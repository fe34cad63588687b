// Convolves the tokens of a step causally, each channel by itself, in one pass from the kept inputs of earlier steps to
// those that the next step needs.
#pragma once

#include <algorithm>

#include "activations.h"
#include "draft_inputs.h"
#include "functions.h"
#include "linear.h"
#include "pool.h"

namespace paged {
namespace {

constexpr int kConvChannels = 128;  // per item: the window of their inputs takes 4 KB at most
constexpr int kMostTaps = 8;

// Returns what storing and loading in a dtype makes of numbers.
inline Floats rounded_to(int32_t dtype, Floats v) {
  if (dtype == PAGED_FLOAT32) return v;
  alignas(64) uint16_t halves[16];
  const Output out{halves, 0, dtype, {}};
  out.store(0, 0, v);
  return Matrix{halves, 0, dtype}.load(0, 0);
}

// Computes up to kConvChannels channels of a row, from `first` on.
inline void convolve_row(const paged_short_conv_args& args, int64_t row, int first) {
  alignas(64) float inputs[kMostTaps][kConvChannels];  // a ring: the input at place p of the row is in p % taps
  const int taps = args.taps, kept = taps - 1, channels = args.channels, dtype = args.dtype;
  const int count = std::min(kConvChannels, channels - first);
  const Matrix x{args.x, args.x_stride, dtype}, gate_in{args.gate_in, args.x_stride, dtype},
      gate_out{args.gate_out, args.x_stride, dtype}, earlier{args.pool, channels, args.pool_dtype};
  const Output out{args.out, args.out_stride, dtype, {}}, later{args.pool, channels, args.pool_dtype, {}};
  const int64_t state = args.rows.slots[row] * (kept + args.most_drafts);
  const RowTokens tokens = tokens_of(args.rows, row);
  const int64_t begin = tokens.begin, length = tokens.end - begin, known = tokens.known_end - begin - tokens.earlier;
  const int64_t skipped = tokens.replayed + tokens.earlier;
  // No place is replaced before it is read: what the slot keeps of a place goes to the same one or to an earlier one.
  const auto keep = [&](int64_t place, int c, const Floats& v) {
    if (place >= known) later.store(state + place - known, first + c, v);
  };
  for (int p = 0; p < kept; ++p)
    for (int c = 0; c < count; c += 16) {
      const bool is_new = args.rows.is_new[row] != 0;
      const Floats v = is_new ? zero_floats() : earlier.load(state + skipped + p, first + c);
      store_floats(inputs[p] + c, v);
      keep(p, c, v);
    }
  for (int64_t t = 0; t < length; ++t) {
    const float* window[kMostTaps];
    for (int k = 0; k < taps; ++k) window[k] = inputs[(t + k) % taps];
    float* const newest = inputs[(t + kept) % taps];
    for (int c = 0; c < count; c += 16) {
      const int col = first + c;
      Floats v = x.load(begin + t, col);
      if (args.gate_in != nullptr) v = rounded_to(dtype, mul(gate_in.load(begin + t, col), v));
      // Later steps find what the pool holds, whichever tokens they begin with.
      if (args.pool_dtype != dtype) v = rounded_to(args.pool_dtype, v);
      store_floats(newest + c, v);
      keep(kept + t, c, v);
      Floats sum = zero_floats();
      for (int k = 0; k < taps; ++k)
        sum = fma(load_floats(args.weight + static_cast<int64_t>(k) * channels + col), load_floats(window[k] + c), sum);
      if (args.bias != nullptr) sum = add(sum, load_floats(args.bias + col));
      if (args.silu != 0) sum = activate(rounded_to(dtype, sum), PAGED_SILU);
      if (args.gate_out != nullptr) sum = mul(gate_out.load(begin + t, col), rounded_to(dtype, sum));
      out.store(begin + t, col, sum);
    }
  }
}

// Computes all rows of a step.
inline Task convolve(Job& job, const paged_short_conv_args args) {
  const int64_t parts = (args.channels + kConvChannels - 1) / kConvChannels, rows = args.rows.num_rows;
  const int64_t tokens = args.rows.first_tokens[rows];
  const int64_t cost = tokens * row_cost(args.channels) / (rows * parts);
  co_await job.phase(rows * parts, cost, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) convolve_row(args, i / parts, i % parts * kConvChannels);
  });
}

}  // namespace
}  // namespace paged
