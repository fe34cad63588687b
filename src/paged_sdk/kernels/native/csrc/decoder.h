// Whole decoder layers in one parallel region: the building blocks of the other headers with barriers between.
#pragma once

#include "attention_batch.h"
#include "mixture.h"
#include "new_keys.h"
#include "product.h"

namespace paged {
namespace {

// Memory of one step, sized for the widest layer.
struct DecoderScratch {
  uint8_t* activations;
  float* projected;  // [rows, queries + keys + values]
  float* attended;   // [rows, queries]
  float* gated;      // [rows, inner]
  uint8_t* sums;     // per thread, kSumPanels panels'
  uint8_t* attention;
  uint8_t* mixture;

  struct Sizes {
    size_t activations, projected, attended, gated, sums, attention, mixture;

    explicit Sizes(const paged_decoder_args& args)
        : activations(0), projected(0), attended(0), gated(0), attention(0), mixture(0) {
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
          grow(gated, row * layer.gate.rows);
          for (const paged_weight* weight : {&layer.gate, &layer.down})
            grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        }
        grow(attention, AttentionScratch::bytes(AttentionPlan(heads, args.batch, args.num_threads), args.num_threads));
      }
      sums = line_aligned(kSumPanels * sums_bytes(args.num_rows));
    }
    size_t total(int num_threads) const {
      return activations + projected + attended + gated + sums * num_threads + attention + mixture;
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
    out.sums = take(sizes.sums * num_threads);
    out.attention = take(sizes.attention);
    out.mixture = take(sizes.mixture);
    return out;
  }
};

// One thread's part of one layer. It begins and ends with all threads past a barrier.
inline void run_layer(const paged_decoder_args& args, const paged_layer& layer, const DecoderScratch& scratch,
                      float (*sums)[kPanelRows], const Team& team) {
  const paged_heads& heads = layer.heads;
  const int rows = args.num_rows, hidden = layer.qkv[0].cols, queries = heads.num_heads * heads.head_dim;
  const int64_t width = queries + 2 * heads.num_kv_heads * heads.head_dim;
  const Matrix stream{args.hidden, hidden, PAGED_FLOAT32};
  const Output back{args.hidden, hidden, PAGED_FLOAT32, stream};
  const auto plain = [](float* data, int64_t stride) { return Output{data, stride, PAGED_FLOAT32, {}}; };

  const Operand input =
      prepare_rows(layer.qkv[0], stream, rows, layer.attention_norm, layer.norm_eps, scratch.activations, team);
  multiply(layer.qkv, layer.num_qkv, input, plain(scratch.projected, width), sums, team);
  team.barrier();

  const Placement placement{heads,        layer.cache, args.batch, layer.query_norm, layer.key_norm,
                            args.cosines, args.sines,  args.slots, args.rotary_half, layer.norm_eps};
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
  multiply(&layer.output, 1, heads_out, back, sums, team);
  team.barrier();

  if (layer.router.weight != nullptr) {
    run_mixture(args, layer, back, scratch.mixture, team);
    return;
  }
  const Operand mlp_input =
      prepare_rows(layer.gate, stream, rows, layer.mlp_norm, layer.norm_eps, scratch.activations, team);
  multiply_gated(layer.gate, layer.up, mlp_input, layer.activation, scratch.gated, sums, team);
  team.barrier();
  const Operand gated = prepare_rows(layer.down, {scratch.gated, layer.gate.rows, PAGED_FLOAT32}, rows, nullptr, 0.0f,
                                     scratch.activations, team);
  multiply(&layer.down, 1, gated, back, sums, team);
  team.barrier();
}

}  // namespace
}  // namespace paged
