// Runs whole decoder layers in one job: the phases of the other headers, in order.
#pragma once

#include "latent_attention.h"
#include "mlp.h"
#include "new_keys.h"
#include "recurrent.h"

namespace paged {
namespace {

// Runs the first part of a layer, which writes what sequences keep of their tokens: computes queries, and new keys and
// values, which are written to the cache; or takes states through the tokens.
inline Task project_rows(Job& job, const Step& step, int index) {
  const paged_decoder_args& args = step.args;
  const DecoderScratch& scratch = step.scratch;
  const paged_layer& layer = args.layers[index];
  if (!has_mixer(layer)) co_return;
  if (is_recurrent(layer)) {
    co_await mix_recurrently(job, step, index);
    co_return;
  }
  if (is_latent(layer)) {
    co_await project_latents(job, step, index);
    co_return;
  }
  const int64_t width = projected_width(layer);
  co_await project_normed(job, step, index, PAGED_QKV, PAGED_OUTPUT, layer.qkv, layer.num_qkv, false,
                          scratch.projected);
  const Placement placement{layer.heads, layer.cache, args.batch, layer, args.ropes[layer.rope], args.slots};
  co_await job.phase(args.num_rows, row_cost(static_cast<int>(width)), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      float* const row = scratch.projected + t * width;
      if (layer.gates == PAGED_GATES_WITH_QUERIES)
        move_gates(layer.heads, row, scratch.attended + t * query_width(layer.heads));
      place_token(placement, row, t, original_row(args, t));
    }
  });
}

// attended = attended * sigmoid(gates), which follow the values of the projected rows.
inline auto gate_attended(Job& job, const Step& step, const paged_layer& layer) {
  const int64_t width = projected_width(layer);
  const int queries = query_width(layer.heads);
  const float* const gates = step.scratch.projected + width - queries;
  return job.phase(step.args.num_rows, 4 * row_cost(queries),
                   [attended = step.scratch.attended, gates, queries, width](int64_t first, int64_t last, int) {
                     for (int64_t row = first; row < last; ++row) {
                       float* const to = attended + row * queries;
                       for (int c = 0; c < queries; c += 16) {
                         const Floats share = sigmoid(load_floats(gates + row * width + c));
                         store_floats(to + c, mul(load_floats(to + c), share));
                       }
                     }
                   });
}

// Attends over the cache, unless the layer is recurrent, and projects the result to `out`.
inline Task attend(Job& job, const Step& step, int index, const Output out) {
  const paged_decoder_args& args = step.args;
  const DecoderScratch& scratch = step.scratch;
  const paged_layer& layer = args.layers[index];
  const int width = attended_width(layer);
  if (is_latent(layer)) {
    co_await attend_over_latents(job, step, layer);
  } else if (!is_recurrent(layer)) {
    const AttentionPlan plan(layer.heads, args.batch, args.num_threads);
    co_await attend_batch(job, plan, layer.cache, {scratch.projected, projected_width(layer), PAGED_FLOAT32},
                          plain_output(scratch.attended, width), AttentionScratch::at(scratch.attention, plan));
  }
  if (layer.gates != 0) co_await gate_attended(job, step, layer);
  const UpdateInput joined =
      join_columns(step, layer.attended_widths, {scratch.attended, width, width}, layer.output.cols);
  const Operand attended = Operand::at(scratch.activations, layer.output, args.num_rows);
  co_await prepare_rows(job, layer.output, {joined.data, joined.stride, PAGED_FLOAT32}, nullptr, 0.0f, attended);
  co_await multiply_adapted(job, step, index, PAGED_OUTPUT, layer.output, attended, joined, out);
}

// Runs a layer's MLP and the experts beside it, and leaves the sum of both in the MLP's branch.
inline Task run_mlp_and_experts(Job& job, const Step& step, int index, const Branch mlp) {
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  co_await run_mlp(job, step, index, {layer.mlp_norm, layer.mlp_norm_bias, mlp.out});
  exchange(step, layer, mlp);
  Arena arena(step.scratch.mixture);
  const MixtureScratch scratch = MixtureScratch::at(arena, args, layer);
  const Branch experts = experts_branch(step, layer);
  co_await run_mixture(job, args, layer, args.hidden, experts.out, scratch);
  exchange(step, layer, experts);
  co_await join_experts(job, layer, mlp.whole, experts.whole, scratch.normed, args.num_rows);
}

// Runs a layer's experts, which have no MLP beside them.
inline Task run_experts_alone(Job& job, const Step& step, int index, const Branch experts) {
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  Arena arena(step.scratch.mixture);
  co_await run_mixture(job, args, layer, args.hidden, experts.out, MixtureScratch::at(arena, args, layer));
  exchange(step, layer, experts);
}

// Runs a layer's MLP, which has no experts beside it.
inline Task run_mlp_alone(Job& job, const Step& step, int index, const Branch mlp) {
  const paged_layer& layer = step.args.layers[index];
  co_await run_mlp(job, step, index, {layer.mlp_norm, layer.mlp_norm_bias, mlp.out});
  exchange(step, layer, mlp);
}

// Runs the feed-forward part of a layer, of whichever kind it is.
inline Task feed_forward(Job& job, const Step& step, int index) {
  const paged_layer& layer = step.args.layers[index];
  const Branch branch = has_mlp(layer) ? mlp_branch(step, layer) : experts_branch(step, layer);
  if (!has_experts(layer)) {
    co_await run_mlp_alone(job, step, index, branch);
  } else if (has_mlp(layer)) {
    co_await run_mlp_and_experts(job, step, index, branch);
  } else {
    co_await run_experts_alone(job, step, index, branch);
  }
  // A layer with an input of its own is scaled once that has been added.
  const float scale = layer.input_gate.data != nullptr ? 1.0f : layer.scale;
  co_await add_branch(job, step, branch, layer.mlp_output_norm, layer.norm_eps, scale);
}

// Runs attention and the MLP of a layer that adds both at once: of the same input, and one product after the other.
inline Task attend_and_feed(Job& job, const Step& step, int index) {
  const paged_layer& layer = step.args.layers[index];
  const Branch branch = attention_branch(step, layer);
  co_await attend(job, step, index, branch.out);
  Output sum = branch.out;
  sum.residual = {sum.data, sum.stride, PAGED_FLOAT32};
  co_await run_mlp(job, step, index, {layer.attention_norm, layer.attention_norm_bias, sum});
  exchange(step, layer, branch);
  co_await add_branch(job, step, branch, nullptr, layer.norm_eps);
}

// Adds what the layer has of a token besides its embedding to the stream, and multiplies the stream by the layer's
// scale.
inline Task add_layer_input(Job& job, const Step& step, int index) {
  const paged_decoder_args& args = step.args;
  const DecoderScratch& scratch = step.scratch;
  const paged_layer& layer = args.layers[index];
  const int rows = args.num_rows, hidden = layer.input_gate.cols, size = layer.input_gate.rows;
  float *const stream = args.hidden, *const gated = scratch.gated;
  const Operand whole = Operand::at(scratch.activations, layer.input_gate, rows);
  co_await prepare_rows(job, layer.input_gate, {stream, hidden, PAGED_FLOAT32}, nullptr, 0.0f, whole);
  co_await multiply_adapted(job, step, index, PAGED_INPUT_GATE, layer.input_gate, whole, {stream, hidden, hidden},
                            plain_output(gated, size));
  co_await job.phase(rows, row_cost(size), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      const float* input = args.layer_inputs + original_row(args, row) * args.layer_input_stride + layer.input_column;
      for (int c = 0; c < size; c += 16) {
        float* const at = gated + row * size + c;
        store_floats(at, mul(activate(load_floats(at), layer.activation), load_floats(input + c)));
      }
    }
  });
  const Branch branch{plain_output(scratch.branch, hidden), nullptr, hidden, scratch.branch, false};
  const Operand inner = Operand::at(scratch.activations, layer.input_output, rows);
  co_await prepare_rows(job, layer.input_output, {gated, size, PAGED_FLOAT32}, nullptr, 0.0f, inner);
  co_await multiply_adapted(job, step, index, PAGED_INPUT_OUTPUT, layer.input_output, inner, {gated, size, size},
                            branch.out);
  co_await add_branch(job, step, branch, layer.input_norm, layer.norm_eps, layer.scale);
}

// Runs the rest of a layer: everything that reads the cache.
inline Task finish_rows(Job& job, const Step& step, int index) {
  const paged_layer& layer = step.args.layers[index];
  if (layer.parallel != 0) {
    co_await attend_and_feed(job, step, index);
  } else {
    if (has_mixer(layer)) {
      const Branch attention = attention_branch(step, layer);
      co_await attend(job, step, index, attention.out);
      exchange(step, layer, attention);
      co_await add_branch(job, step, attention, layer.attention_output_norm, layer.norm_eps);
    }
    if (has_mlp(layer) || has_experts(layer)) co_await feed_forward(job, step, index);
  }
  if (layer.input_gate.data != nullptr) co_await add_layer_input(job, step, index);
}

inline Task run_layer(Job& job, const Step& step, int index) {
  co_await project_rows(job, step, index);
  co_await finish_rows(job, step, index);
}

// Returns the last layer that writes keys or states; -1 if none does.
inline int last_that_keeps(const paged_decoder_args& args) {
  int layer = args.num_layers - 1;
  while (layer >= 0 && (!has_mixer(args.layers[layer]) || args.layers[layer].shares_keys != 0)) --layer;
  return layer;
}

// Returns what the rest of a layer reads of its first part: queries, with gates if there are any, or what its states
// have become.
inline Columns read_later(const paged_layer& layer, const DecoderScratch& scratch) {
  const int64_t width = projected_width(layer), attended = attended_width(layer);
  if (is_recurrent(layer)) return {scratch.attended, attended, attended};
  return {scratch.projected, width, layer.gates != PAGED_NO_GATES ? width : query_width(layer)};
}

// Runs all layers. The last one that keeps anything of its tokens computes that for all rows, for later steps. The rest
// of it, and layers after it, are computed only for rows that are read: for a prompt's chunk, one or none.
inline Task run_layers(Job& job, const paged_decoder_args& args, const DecoderScratch& scratch,
                       const ThreadSums& sums) {
  const AdapterScratch& own = scratch.adapters;
  AdaptedRows adapted, adapted_read;
  if (args.num_adapters > 0) adapted = AdaptedRows::sorted(args, args.adapter_of_row, args.num_rows, own.sorted);
  const Step all{args, adapted, scratch, sums};
  paged_decoder_args read = only_read(args);
  if (read.num_rows == args.num_rows) {
    for (int i = 0; i < args.num_layers; ++i) co_await run_layer(job, all, i);
    co_return;
  }
  const int last = last_that_keeps(args);
  for (int i = 0; i < last; ++i) co_await run_layer(job, all, i);
  if (last >= 0) co_await project_rows(job, all, last);
  if (read.num_rows == 0) co_return;

  read.hidden = scratch.read;
  read.original_rows = scratch.original_rows;
  const Columns kept = last < 0 ? Columns{} : read_later(args.layers[last], scratch);
  gather_read(args, kept, scratch.read, scratch.original_rows);
  if (args.num_adapters > 0) {
    gather_adapters(args, own.of_read);
    adapted_read = AdaptedRows::sorted(args, own.of_read, read.num_rows, own.sorted_read);
  }
  const Step few{read, adapted_read, scratch, sums};
  if (last >= 0) co_await finish_rows(job, few, last);
  for (int i = last + 1; i < args.num_layers; ++i) co_await run_layer(job, few, i);
  scatter_read(args, scratch.read);
}

}  // namespace
}  // namespace paged
