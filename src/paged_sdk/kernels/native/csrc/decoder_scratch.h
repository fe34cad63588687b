// Holds what the parts of a decoder layer share: the rows that they compute, and a step's scratch memory.
#pragma once

#include <algorithm>

#include "attention_batch.h"
#include "latent_scratch.h"
#include "lora.h"
#include "mixture.h"
#include "product.h"
#include "read_rows.h"

namespace paged {
namespace {

inline bool has_mlp(const paged_layer& layer) { return layer.up.data != nullptr; }
inline bool has_experts(const paged_layer& layer) { return layer.mixture.router != nullptr; }

// Whether a branch of the layer has an output norm, or is joined with another, before it is added to the residual
// stream.
inline bool adds_apart(const paged_layer& layer) {
  return layer.attention_output_norm != nullptr || layer.parallel != 0 || (has_mlp(layer) && has_experts(layer));
}

// Returns the first matrix of an MLP.
inline const paged_weight& first_of_mlp(const paged_layer& layer) {
  return layer.gate.data != nullptr ? layer.gate : layer.up;
}

// Number of output columns of each expert.
inline int columns_of_experts(const paged_layer& layer) {
  return layer.mixture.down.rows / layer.mixture.choice.num_experts;
}

// Scratch memory of one step, sized for the widest layer.
struct DecoderScratch {
  int32_t* original_rows;  // [rows that are read]: their rows of the step
  uint8_t* activations;
  float* projected;  // [rows, projected_width]
  float* attended;   // [rows, attended_width]
  float* gated;      // [rows, inner], or the same as DenseRows
  float* branch;     // [rows, hidden]: a branch's output (branch.h), or those of both in parallel layers
  float* beside;     // [rows, hidden]: the output of experts beside an MLP
  float* joined;     // [rows, attended_width or inner], gathered from all ranks
  float* part;       // [rows, rows of output or down]: this rank's columns of the branch
  float* normed;     // [rows, hidden], after a LayerNorm
  float* read;       // [rows that are read, hidden]: their residual stream, unless all rows are read
  uint8_t* sums;     // per thread: sums of kSumPanels panels
  uint8_t* attention;  // of all rows, or of one part of them (latent_scratch.h)
  uint8_t* mixture;
  AdapterScratch adapters;

  // Of each part, the size in the layer where it is largest: floats, or bytes of those that hold several things.
  struct Sizes {
    size_t activations = 0, projected = 0, attended = 0, gated = 0, branch = 0, beside = 0, joined = 0, part = 0;
    size_t normed = 0, read = 0, attention = 0, mixture = 0, original_rows = 0;

    explicit Sizes(const paged_decoder_args& args) {
      const size_t rows = args.num_rows, hidden = args.hidden_size;
      for (int i = 0; i < args.num_layers; ++i) {
        const paged_layer& layer = args.layers[i];
        grow(projected, rows * projected_width(layer));
        grow(attended, rows * attended_width(layer));
        for (const paged_weight* weight : {&layer.qkv[0], &layer.output, &layer.latent.down, &layer.latent.query_up,
                                           &layer.recurrent.rates[0]})
          if (weight->data != nullptr) grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        if (has_mlp(layer)) {
          grow(gated, DenseRows::bytes(args.num_rows, layer.up.rows));
          for (const paged_weight* weight : {&first_of_mlp(layer), &layer.down})
            grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
          if (layer.inner_widths != nullptr) {
            grow(joined, rows * layer.down.cols);
            grow(part, rows * layer.down.rows);
          }
        }
        if (has_experts(layer)) {
          grow(mixture, MixtureScratch::bytes(args, layer));
          if (layer.mixture.inner_widths != nullptr) grow(part, rows * columns_of_experts(layer));
          if (has_mlp(layer)) grow(beside, rows * hidden);
        }
        if (layer.input_gate.data != nullptr) {
          grow(gated, sizeof(float) * rows * layer.input_gate.rows);
          for (const paged_weight* weight : {&layer.input_gate, &layer.input_output})
            grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        }
        if (layer.attended_widths != nullptr) {
          grow(joined, rows * layer.output.cols);
          grow(part, rows * layer.output.rows);
        }
        if (layer.norm == PAGED_LAYER_NORM) grow(normed, rows * hidden);
        if (args.sum != nullptr || adds_apart(layer)) grow(branch, rows * hidden);
        // Few rows of a sequence may use another attention kernel than many, with other scratch.
        const paged_decoder_args last = only_read(args);
        if (last.num_rows < args.num_rows) grow(read, last.num_rows * hidden);
        for (const paged_batch* batch : {&args.batch, &last.batch})
          grow(attention, attention_bytes(layer, *batch, args.num_threads));
      }
      if (args.cu_seqlens_read != nullptr) original_rows = only_read(args).num_rows;
    }

   private:
    static size_t attention_bytes(const paged_layer& layer, const paged_batch& batch, int num_threads) {
      if (is_recurrent(layer) || !has_mixer(layer)) return 0;
      if (is_latent(layer)) return latent_bytes(layer, batch, num_threads);
      return AttentionScratch::bytes(AttentionPlan(layer.heads, batch, num_threads), num_threads);
    }
    static void grow(size_t& size, size_t needed) { size = std::max(size, needed); }
  };

  static DecoderScratch at(Arena& arena, const Sizes& sizes, const paged_decoder_args& args) {
    DecoderScratch out{};
    out.original_rows = arena.take<int32_t>(sizes.original_rows);
    out.activations = arena.take<uint8_t>(sizes.activations);
    out.projected = arena.take<float>(sizes.projected);
    out.attended = arena.take<float>(sizes.attended);
    out.gated = reinterpret_cast<float*>(arena.take<uint8_t>(sizes.gated));
    out.branch = arena.take<float>(sizes.branch);
    out.beside = arena.take<float>(sizes.beside);
    out.joined = arena.take<float>(sizes.joined);
    out.part = arena.take<float>(sizes.part);
    out.normed = arena.take<float>(sizes.normed);
    out.read = arena.take<float>(sizes.read);
    out.sums = arena.take<uint8_t>(ThreadSums::bytes_of(args.num_rows) * args.num_threads);
    out.attention = arena.take<uint8_t>(sizes.attention);
    out.mixture = arena.take<uint8_t>(sizes.mixture);
    out.adapters = AdapterScratch::at(arena, args);
    return out;
  }
  static size_t bytes(const Sizes& sizes, const paged_decoder_args& args) {
    Arena arena(nullptr);
    at(arena, sizes, args);
    return arena.used();
  }
};

// A step as the parts of a layer see it.
struct Step {
  const paged_decoder_args& args;
  const AdaptedRows& adapted;
  const DecoderScratch& scratch;
  const ThreadSums& sums;
};

}  // namespace
}  // namespace paged
