// Adds the outputs of a layer's branches - attention, its MLP, its experts - to the residual stream, and exchanges them
// between ranks before.
#pragma once

#include "decoder_scratch.h"

namespace paged {
namespace {

inline Output plain_output(float* data, int64_t stride) { return {data, stride, PAGED_FLOAT32, {}}; }

// Where a branch's last product is written, and where its output is once it is whole.
struct Branch {
  Output out;
  const int32_t* widths;  // [ranks]: columns of the last product's input per rank; null: its results are summed
  int columns;            // of `out`
  float* whole;           // [rows, hidden]
  bool in_stream;         // whether `whole` is the residual stream, and the output has been added to it
};

// Describes a branch whose last product has `columns` columns here. It goes to `buffer` if it is added later.
//
// One rank alone adds each product to the stream in the epilogue, and adapters' updates after it. Ranks that gather
// columns keep that order: they gather the stream itself. Ranks that sum need the product alone.
inline Branch branch_of(const Step& step, const paged_layer& layer, const int32_t* widths, int columns, float* buffer,
                        bool added_later) {
  const paged_decoder_args& args = step.args;
  const int hidden = args.hidden_size;
  const bool in_stream = !added_later && (widths != nullptr || args.sum == nullptr);
  float* const whole = in_stream ? args.hidden : buffer;
  const bool is_part = widths != nullptr;
  Output out = is_part ? plain_output(step.scratch.part, columns) : plain_output(whole, hidden);
  if (in_stream) out.residual = {args.hidden + (is_part ? layer.first_hidden : 0), hidden, PAGED_FLOAT32};
  return {out, widths, columns, whole, in_stream};
}

inline Branch attention_branch(const Step& step, const paged_layer& layer) {
  const bool later = layer.attention_output_norm != nullptr || layer.parallel != 0;
  return branch_of(step, layer, layer.attended_widths, layer.output.rows, step.scratch.branch, later);
}

inline Branch mlp_branch(const Step& step, const paged_layer& layer) {
  const bool later = layer.mlp_output_norm != nullptr || has_experts(layer);
  return branch_of(step, layer, layer.inner_widths, layer.down.rows, step.scratch.branch, later);
}

inline Branch experts_branch(const Step& step, const paged_layer& layer) {
  const bool later = layer.mlp_output_norm != nullptr || has_mlp(layer);
  float* const buffer = has_mlp(layer) ? step.scratch.beside : step.scratch.branch;
  return branch_of(step, layer, layer.mixture.inner_widths, columns_of_experts(layer), buffer, later);
}

// Makes a branch whole: gathers the ranks' columns, or sums their partial results.
inline void exchange(const Step& step, const paged_layer& layer, const Branch& branch) {
  const paged_decoder_args& args = step.args;
  if (args.sum == nullptr) return;
  if (branch.widths != nullptr) {
    args.gather(args.group, step.scratch.part, branch.columns, args.num_rows, layer.hidden_widths, branch.whole);
  } else {
    args.sum(args.group, branch.whole, static_cast<int64_t>(args.num_rows) * args.hidden_size);
  }
}

// Gathers whole rows from the ranks' columns; without widths, returns this rank's own rows.
inline UpdateInput join_columns(const Step& step, const int32_t* widths, const UpdateInput own, int cols) {
  if (widths == nullptr) return own;
  step.args.gather(step.args.group, own.data, own.stride, step.args.num_rows, widths, step.scratch.joined);
  return {step.scratch.joined, cols, cols};
}

// stream = (stream + norm(branch)) * scale, unless the branch is in the stream already.
inline auto add_branch(Job& job, const Step& step, const Branch& branch, const float* norm, float eps,
                       float scale = 1.0f) {
  const int hidden = step.args.hidden_size;
  return job.phase(branch.in_stream ? 0 : step.args.num_rows, row_cost(hidden),
                   [whole = Matrix{branch.whole, hidden, PAGED_FLOAT32}, stream = step.args.hidden, hidden, norm, eps,
                    scale](int64_t first, int64_t last, int) {
                     const Floats scales = broadcast(scale);
                     for (int64_t row = first; row < last; ++row) {
                       const Floats factor = broadcast(norm != nullptr ? inverse_rms(whole, row, hidden, eps) : 1.0f);
                       float* to = stream + row * hidden;
                       for (int c = 0; c < hidden; c += 16) {
                         Floats output = whole.load(row, c);
                         if (norm != nullptr) output = mul(mul(output, factor), load_floats(norm + c));
                         store_floats(to + c, mul(add(load_floats(to + c), output), scales));
                       }
                     }
                   });
}

}  // namespace
}  // namespace paged
