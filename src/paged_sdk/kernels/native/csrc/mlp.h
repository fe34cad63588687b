// Runs a layer's MLP, with or without a gate, and with the updates of adapters.
#pragma once

#include "branch.h"

namespace paged {
namespace {

// Normalizes the rows of the residual stream and converts them to the form that a weight multiplies.
inline Task prepare_normed(Job& job, const Step& step, const paged_layer& layer, const paged_weight& weight,
                           const float* norm, const float* bias, const Operand out) {
  const int hidden = weight.cols;
  const Matrix input{step.args.hidden, hidden, PAGED_FLOAT32};
  if (layer.norm != PAGED_LAYER_NORM || norm == nullptr) {
    co_await prepare_rows(job, weight, input, norm, layer.norm_eps, out);
    co_return;
  }
  float* const normed = step.scratch.normed;
  co_await job.phase(out.num_rows, row_cost(hidden), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      normalize_layer(step.args.hidden + row * hidden, hidden, norm, bias, layer.norm_eps, normed + row * hidden);
  });
  co_await prepare_rows(job, weight, {normed, hidden, PAGED_FLOAT32}, nullptr, 0.0f, out);
}

// Multiplies the normalized rows of the stream, which may be prepared already, and adds the adapters' updates of
// `num_updates` projections.
inline Task project_normed(Job& job, const Step& step, int index, int projection, int num_updates,
                           const paged_weight* weights, int num_weights, bool is_prepared, float* const to) {
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  const int64_t width = projected_width(layer);
  const AdapterScratch& own = step.scratch.adapters;
  const Operand normed = Operand::at(step.scratch.activations, weights[0], args.num_rows);
  if (!is_prepared)
    co_await prepare_normed(job, step, layer, weights[0], layer.attention_norm, layer.attention_norm_bias, normed);
  co_await multiply(job, weights, num_weights, normed, plain_output(to, width), step.sums);
  if (!step.adapted.change(index, projection, num_updates)) co_return;
  co_await normalize_adapted(job, step.adapted, args, layer, layer.attention_norm, layer.attention_norm_bias,
                             own.normed);
  co_await add_updates(job, step.adapted, index, projection, num_updates,
                       {own.normed, args.hidden_size, args.hidden_size, true}, to, width, own.shrunk);
}

// Multiplies into the residual stream or a buffer, and adds the adapters' updates.
inline Task multiply_adapted(Job& job, const Step& step, int index, int projection, const paged_weight& weight,
                             const Operand rows, const UpdateInput x, const Output out) {
  // An adapter with gains scales the product, so the product must not have been added to the stream yet. This applies
  // to the rows of all adapters: otherwise the order of their sums would depend on whether another adapter of the step
  // has gains.
  const AdapterScratch& own = step.scratch.adapters;
  const bool changes = step.adapted.change(index, projection, 1), apart = changes && out.residual.data != nullptr;
  const Output to = apart ? plain_output(own.product, weight.rows) : out;
  co_await multiply(job, &weight, 1, rows, to, step.sums);
  if (!changes) co_return;
  co_await add_updates(job, step.adapted, index, projection, 1, x, static_cast<float*>(to.data), to.stride, own.shrunk);
  if (apart) co_await add_product(job, own.product, out, rows.num_rows, weight.rows);
}

// How an MLP normalizes the residual stream, and where it writes its output.
struct MlpEnds {
  const float* norm;
  const float* bias;
  Output out;
};

// Runs the MLP if adapters update it: gate and up are complete before the activation combines them.
inline Task run_adapted_mlp(Job& job, const Step& step, int index, const MlpEnds ends) {
  static_assert(offsetof(paged_layer, up) == offsetof(paged_layer, gate) + sizeof(paged_weight));
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  const paged_weight& first = first_of_mlp(layer);
  const int count = layer.gate.data != nullptr ? 2 : 1, first_projection = PAGED_GATE_UP + 2 - count;
  const int rows = args.num_rows, hidden = first.cols, inner = layer.up.rows, width = count * inner;
  const AdapterScratch& own = step.scratch.adapters;
  const Operand mlp_input = Operand::at(step.scratch.activations, first, rows);
  co_await prepare_normed(job, step, layer, first, ends.norm, ends.bias, mlp_input);
  co_await multiply(job, &first, count, mlp_input, plain_output(own.gate_up, width), step.sums);
  if (step.adapted.change(index, first_projection, count)) {
    co_await normalize_adapted(job, step.adapted, args, layer, ends.norm, ends.bias, own.normed);
    co_await add_updates(job, step.adapted, index, first_projection, count, {own.normed, hidden, hidden, true},
                         own.gate_up, width, own.shrunk);
  }
  co_await activate_rows(job, own.gate_up, inner, count == 2, layer, rows);
  const UpdateInput joined = join_columns(step, layer.inner_widths, {own.gate_up, width, inner}, layer.down.cols);
  const Operand gated = Operand::at(step.scratch.activations, layer.down, rows);
  co_await prepare_rows(job, layer.down, {joined.data, joined.stride, PAGED_FLOAT32}, nullptr, 0.0f, gated);
  co_await multiply_adapted(job, step, index, PAGED_DOWN, layer.down, gated, joined, ends.out);
}

// Runs the MLP.
inline Task run_mlp(Job& job, const Step& step, int index, const MlpEnds ends) {
  if (step.adapted.change(index, PAGED_GATE_UP, 3)) {
    co_await run_adapted_mlp(job, step, index, ends);
    co_return;
  }
  const paged_layer& layer = step.args.layers[index];
  const paged_weight& first = first_of_mlp(layer);
  const int rows = step.args.num_rows, inner = layer.up.rows;
  float* const hidden = step.scratch.gated;
  const Operand mlp_input = Operand::at(step.scratch.activations, first, rows);
  co_await prepare_normed(job, step, layer, first, ends.norm, ends.bias, mlp_input);
  const bool ready = layer.gate.data != nullptr && layer.inner_widths == nullptr &&
                     takes_hidden_as_it_comes(layer.gate, layer.down);
  uint8_t* const memory = ready ? reinterpret_cast<uint8_t*>(hidden) : step.scratch.activations;
  const Operand gated = Operand::at(memory, layer.down, rows);
  if (layer.gate.data == nullptr) {
    co_await multiply(job, &layer.up, 1, mlp_input, plain_output(hidden, inner), step.sums);
    co_await activate_rows(job, hidden, inner, false, layer, rows);
  } else {
    co_await multiply_gated(job, layer.gate, layer.up, layer.down, ready, mlp_input, layer.activation, hidden,
                            step.sums);
  }
  if (!ready) {
    const UpdateInput whole = join_columns(step, layer.inner_widths, {hidden, inner, inner}, layer.down.cols);
    co_await prepare_rows(job, layer.down, {whole.data, whole.stride, PAGED_FLOAT32}, nullptr, 0.0f, gated);
  }
  co_await multiply(job, &layer.down, 1, gated, ends.out, step.sums);
}

}  // namespace
}  // namespace paged
