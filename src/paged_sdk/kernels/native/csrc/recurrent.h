// Computes what a layer has in the place of attention: a short convolution, alone between its gates or followed by a
// recurrence.
#pragma once

#include "gated_delta.h"
#include "mamba2.h"
#include "mlp.h"
#include "short_conv.h"

namespace paged {
namespace {

// Takes the states of the step's sequences through their tokens, and leaves what the output projection multiplies.
inline Task mix_recurrently(Job& job, const Step& step, int index) {
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  const paged_recurrent& own = layer.recurrent;
  const int64_t width = projected_width(layer), result = attended_width(layer);
  const int num_threads = args.num_threads;
  float *const projected = step.scratch.projected, *const mixed = step.scratch.attended;
  float* const rates = projected + total_rows(layer.qkv, layer.num_qkv);
  co_await project_normed(job, step, index, PAGED_QKV, own.num_rates > 0 ? PAGED_RATES : PAGED_OUTPUT, layer.qkv,
                          layer.num_qkv, false, projected);
  if (own.num_rates > 0)
    co_await project_normed(job, step, index, PAGED_RATES, PAGED_OUTPUT - PAGED_RATES, own.rates, own.num_rates,
                            share_input(layer.qkv[0], own.rates[0]), rates);

  paged_short_conv_args conv = own.conv;
  conv.rows = args.recurrent, conv.x_stride = width, conv.dtype = PAGED_FLOAT32, conv.num_threads = num_threads;
  if (own.delta.rate == nullptr && own.scan.rate == nullptr) {
    conv.gate_in = projected, conv.gate_out = projected + conv.channels, conv.x = projected + 2 * conv.channels;
    conv.out = mixed, conv.out_stride = result;
    co_await convolve(job, conv);
    co_return;
  }
  float* const inputs = projected + (own.scan.rate != nullptr ? result : 0);
  float* const rest = inputs + conv.channels;
  conv.x = conv.out = inputs, conv.out_stride = width;
  co_await convolve(job, conv);
  if (own.scan.rate != nullptr) {
    paged_mamba2_args scanned = own.scan;
    scanned.rows = args.recurrent, scanned.dtype = PAGED_FLOAT32, scanned.num_threads = num_threads;
    scanned.inputs = inputs, scanned.steps = rest, scanned.gates = projected;
    scanned.inputs_stride = scanned.steps_stride = scanned.gates_stride = width;
    scanned.out = scanned.read = mixed;
    co_await scan(job, scanned);
  } else {
    paged_gated_delta_args delta = own.delta;
    delta.rows = args.recurrent, delta.dtype = PAGED_FLOAT32, delta.num_threads = num_threads;
    delta.inputs = inputs, delta.gates = rest, delta.rates = rates;
    delta.inputs_stride = delta.gates_stride = delta.rates_stride = width;
    delta.out = mixed;
    co_await apply_gated_delta(job, delta);
  }
}

}  // namespace
}  // namespace paged
