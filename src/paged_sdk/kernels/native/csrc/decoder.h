// Whole decoder layers in one parallel region: the building blocks of the other headers with barriers between.
#pragma once

#include "attention_batch.h"
#include "mixture.h"
#include "new_keys.h"
#include "product.h"

namespace paged {
namespace {

// Whether the outputs of attention and feed-forward are normalized before they are added to the residual stream.
inline bool has_output_norms(const paged_decoder_args& args) {
  return args.layers[0].attention_output_norm != nullptr;
}

// Memory of one step, sized for the widest layer.
struct DecoderScratch {
  uint8_t* activations;
  float* projected;  // [rows, queries + keys + values]
  float* attended;   // [rows, queries]
  float* gated;      // [rows, inner], or DenseRows of as many
  float* branch;     // [rows, hidden]: of attention or feed-forward, before its own norm
  float* streams;    // [threads - 1, rows, hidden] of up to kPrivateRows rows
  uint8_t* sums;     // per thread, kSumPanels panels'
  uint8_t* attention;
  uint8_t* mixture;

  struct Sizes {
    size_t activations, projected, attended, gated, branch, streams, sums, attention, mixture;

    explicit Sizes(const paged_decoder_args& args)
        : activations(0), projected(0), attended(0), gated(0), branch(0), streams(0), attention(0), mixture(0) {
      const size_t row = sizeof(float) * args.num_rows;
      for (int i = 0; i < args.num_layers; ++i) {
        const paged_layer& layer = args.layers[i];
        const paged_heads& heads = layer.heads;
        const int queries = heads.num_heads * heads.head_dim;
        grow(projected, row * (queries + 2 * heads.num_kv_heads * heads.head_dim));
        grow(attended, row * queries);
        for (const paged_weight* weight : {&layer.qkv[0], &layer.output})
          grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        if (layer.router.weight != nullptr) {
          grow(mixture, MixtureScratch::Sizes(args, layer).total());
        } else {
          grow(gated, DenseRows::bytes(args.num_rows, layer.gate.rows));
          for (const paged_weight* weight : {&layer.gate, &layer.down})
            grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        }
        grow(attention, AttentionScratch::bytes(AttentionPlan(heads, args.batch, args.num_threads), args.num_threads));
      }
      if (has_output_norms(args)) {
        branch = line_aligned(row * args.layers[0].qkv[0].cols);
        if (args.num_rows <= kPrivateRows) streams = branch * (args.num_threads - 1);
      }
      sums = line_aligned(kSumPanels * sums_bytes(args.num_rows));
    }
    size_t total(int num_threads) const {
      return activations + projected + attended + gated + branch + streams + sums * num_threads + attention + mixture;
    }

   private:
    static void grow(size_t& size, size_t needed) { size = line_aligned(needed) > size ? line_aligned(needed) : size; }
  };

  static DecoderScratch at(uint8_t* memory, const Sizes& sizes, int num_threads) {
    DecoderScratch out{};
    const auto take = [&memory](size_t bytes) {
      uint8_t* taken = memory;
      memory += bytes;
      return taken;
    };
    out.activations = take(sizes.activations);
    out.projected = reinterpret_cast<float*>(take(sizes.projected));
    out.attended = reinterpret_cast<float*>(take(sizes.attended));
    out.gated = reinterpret_cast<float*>(take(sizes.gated));
    out.branch = reinterpret_cast<float*>(take(sizes.branch));
    out.streams = reinterpret_cast<float*>(take(sizes.streams));
    out.sums = take(sizes.sums * num_threads);
    out.attention = take(sizes.attention);
    out.mixture = take(sizes.mixture);
    return out;
  }
};

// The residual stream as one thread sees it. A norm needs a whole row of a branch, so threads cannot add their products
// to the stream as they finish them. Up to kPrivateRows rows, each thread adds all rows to a copy of its own; beyond
// that, each adds its share of rows to the one stream.
inline float* stream_of(const paged_decoder_args& args, const DecoderScratch& scratch, const Team& team) {
  if (team.index == 0 || args.num_rows > kPrivateRows || !has_output_norms(args)) return args.hidden;
  const size_t bytes = sizeof(float) * args.num_rows * args.layers[0].qkv[0].cols;
  float* own = scratch.streams + line_aligned(bytes) / sizeof(float) * (team.index - 1);
  __builtin_memcpy(own, args.hidden, bytes);
  return own;
}

// stream += norm(branch); nothing where there is no norm, and the branch is in the stream already. It begins with all
// threads past a barrier, and when it ends, the calling thread may read all of the stream.
inline void add_branch(const DecoderScratch& scratch, float* stream, int num_rows, int hidden, const float* norm,
                       float eps, const Team& team) {
  if (norm == nullptr) return;
  const bool own = num_rows <= kPrivateRows;
  const auto [first, last] = own ? Team::Range{0, num_rows} : team.share(num_rows);
  const Matrix branch{scratch.branch, hidden, PAGED_FLOAT32};
  for (int64_t row = first; row < last; ++row) {
    const Floats factor = broadcast(inverse_rms(branch, row, hidden, eps));
    float* to = stream + row * hidden;
    for (int c = 0; c < hidden; c += 16)
      store_floats(to + c, add(load_floats(to + c), mul(mul(branch.load(row, c), factor), load_floats(norm + c))));
  }
  if (!own) team.barrier();
}

// One thread's part of one layer. It begins and ends with all threads past a barrier, or past their own part of the
// stream.
inline void run_layer(const paged_decoder_args& args, const paged_layer& layer, float* stream,
                      const DecoderScratch& scratch, float (*sums)[kPanelRows], const Team& team) {
  const paged_heads& heads = layer.heads;
  const int rows = args.num_rows, hidden = layer.qkv[0].cols, queries = heads.num_heads * heads.head_dim;
  const int64_t width = queries + 2 * heads.num_kv_heads * heads.head_dim;
  const auto plain = [](float* data, int64_t stride) { return Output{data, stride, PAGED_FLOAT32, {}}; };
  const Matrix input{stream, hidden, PAGED_FLOAT32};
  const Output branch = layer.attention_output_norm != nullptr ? plain(scratch.branch, hidden)
                                                               : Output{stream, hidden, PAGED_FLOAT32, input};

  const Operand normed =
      prepare_rows(layer.qkv[0], input, rows, layer.attention_norm, layer.norm_eps, scratch.activations, team);
  multiply(layer.qkv, layer.num_qkv, normed, plain(scratch.projected, width), sums, team);
  team.barrier();

  const Placement placement{heads,          layer.cache,    args.batch, layer.query_norm,
                            layer.key_norm, args.ropes[layer.rope], args.slots, layer.norm_eps};
  const AttentionPlan plan(heads, args.batch, args.num_threads);
  const AttentionScratch attention = AttentionScratch::at(scratch.attention, plan);
  const auto [first, last] = team.share(rows);
  for (int64_t t = first; t < last; ++t) place_token(placement, scratch.projected + t * width, t);
  if (team.index == 0) {
    attention.offsets.fill(plan);
    team.workspace.next_item.store(0, std::memory_order_relaxed);
  }
  team.barrier();
  attend_batch(plan, layer.cache, {scratch.projected, width, PAGED_FLOAT32}, plain(scratch.attended, queries),
               attention, team);
  team.barrier();
  const Operand heads_out = prepare_rows(layer.output, {scratch.attended, queries, PAGED_FLOAT32}, rows, nullptr, 0.0f,
                                         scratch.activations, team);
  multiply(&layer.output, 1, heads_out, branch, sums, team);
  team.barrier();
  add_branch(scratch, stream, rows, hidden, layer.attention_output_norm, layer.norm_eps, team);

  if (layer.router.weight != nullptr) {
    run_mixture(args, layer, stream, branch, scratch.mixture, team);
  } else {
    const Operand mlp_input =
        prepare_rows(layer.gate, input, rows, layer.mlp_norm, layer.norm_eps, scratch.activations, team);
    const Operand gated = multiply_gated_for(layer.down, layer.gate, layer.up, mlp_input, rows, layer.activation,
                                             scratch.gated, scratch.activations, sums, team);
    multiply(&layer.down, 1, gated, branch, sums, team);
    team.barrier();
  }
  add_branch(scratch, stream, rows, hidden, layer.mlp_output_norm, layer.norm_eps, team);
}

}  // namespace
}  // namespace paged
