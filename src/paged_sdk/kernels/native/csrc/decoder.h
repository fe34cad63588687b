// Runs whole decoder layers in one job: the phases of the other headers, in order.
#pragma once

#include <algorithm>

#include "attention_batch.h"
#include "lora.h"
#include "mixture.h"
#include "new_keys.h"
#include "product.h"
#include "read_rows.h"

namespace paged {
namespace {

// Whether the outputs of attention and feed-forward are normalized before they are added to the residual stream.
inline bool has_output_norms(const paged_decoder_args& args) {
  return args.layers[0].attention_output_norm != nullptr;
}

// Whether the outputs of attention and feed-forward are buffered in `branch` before they are added to the residual
// stream.
inline bool has_branch(const paged_decoder_args& args) {
  return has_output_norms(args) || args.layers[0].parallel != 0 || args.sum != nullptr;
}

// Returns the first matrix of a feed-forward network.
inline const paged_weight& first_of_mlp(const paged_layer& layer) {
  return layer.gate.data != nullptr ? layer.gate : layer.up;
}

// Number of output columns of the last matrix of attention or feed-forward; for experts, of each expert.
inline int columns_of(const paged_layer& layer, const paged_weight& last) {
  return &last == &layer.down && layer.router.weight != nullptr ? last.rows / layer.router.num_experts : last.rows;
}

// Scratch memory of one step, sized for the widest layer.
struct DecoderScratch {
  int32_t* original_rows;  // [rows that are read]: their rows of the step
  uint8_t* activations;
  float* projected;  // [rows, queries + keys + values]
  float* attended;   // [rows, queries]
  float* gated;      // [rows, inner], or the same as DenseRows
  float* branch;     // [rows, hidden]: attention or feed-forward output before its own norm, or both in parallel layers
  float* joined;     // [rows, queries or inner], gathered from all ranks
  float* part;       // [rows, columns_of output or down]: this rank's columns of the branch
  float* normed;     // [rows, hidden], after a LayerNorm
  float* read;       // [rows that are read, hidden]: their residual stream, unless all rows are read
  uint8_t* sums;     // per thread: sums of kSumPanels panels
  uint8_t* attention;
  uint8_t* mixture;
  AdapterScratch adapters;

  // Of each part, the size in the layer where it is largest: floats, or bytes of those that hold several things.
  struct Sizes {
    size_t activations = 0, projected = 0, attended = 0, gated = 0, branch = 0, joined = 0, part = 0, normed = 0;
    size_t read = 0, attention = 0, mixture = 0, original_rows = 0;

    explicit Sizes(const paged_decoder_args& args) {
      const size_t rows = args.num_rows;
      for (int i = 0; i < args.num_layers; ++i) {
        const paged_layer& layer = args.layers[i];
        const paged_heads& heads = layer.heads;
        const int queries = heads.num_heads * heads.head_dim;
        grow(projected, rows * (queries + 2 * heads.num_kv_heads * heads.head_dim));
        grow(attended, rows * queries);
        for (const paged_weight* weight : {&layer.qkv[0], &layer.output})
          grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
        if (layer.router.weight != nullptr) {
          grow(mixture, MixtureScratch::bytes(args, layer));
        } else {
          grow(gated, DenseRows::bytes(args.num_rows, layer.up.rows));
          for (const paged_weight* weight : {&first_of_mlp(layer), &layer.down})
            grow(activations, Operand::bytes(*weight, args.num_rows, args.num_threads));
          if (layer.inner_widths != nullptr) grow(joined, rows * layer.down.cols);
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
        if (layer.inner_widths != nullptr) grow(part, rows * columns_of(layer, layer.down));
        if (layer.norm == PAGED_LAYER_NORM) grow(normed, rows * layer.qkv[0].cols);
        // Few rows of a sequence may use another attention kernel than many, with other scratch.
        const paged_decoder_args last = only_read(args);
        if (last.num_rows < args.num_rows) grow(read, static_cast<size_t>(last.num_rows) * layer.qkv[0].cols);
        for (const paged_batch* batch : {&args.batch, &last.batch})
          grow(attention, AttentionScratch::bytes(AttentionPlan(heads, *batch, args.num_threads), args.num_threads));
      }
      if (has_branch(args)) branch = rows * args.layers[0].qkv[0].cols;
      if (args.cu_seqlens_read != nullptr) original_rows = only_read(args).num_rows;
    }

   private:
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

// stream = (stream + norm(branch)) * scale. Without a norm this does nothing: the branch has been added to the stream
// already.
inline auto add_branch(Job& job, const DecoderScratch& scratch, float* stream, int num_rows, int hidden,
                       const float* norm, float eps, float scale = 1.0f) {
  return job.phase(norm == nullptr ? 0 : num_rows, row_cost(hidden),
                   [branch = Matrix{scratch.branch, hidden, PAGED_FLOAT32}, stream, hidden, norm, eps, scale](
                       int64_t first, int64_t last, int) {
                     const Floats scales = broadcast(scale);
                     for (int64_t row = first; row < last; ++row) {
                       const Floats factor = broadcast(inverse_rms(branch, row, hidden, eps));
                       float* to = stream + row * hidden;
                       for (int c = 0; c < hidden; c += 16) {
                         const Floats sum = add(load_floats(to + c),
                                                mul(mul(branch.load(row, c), factor), load_floats(norm + c)));
                         store_floats(to + c, mul(sum, scales));
                       }
                     }
                   });
}

// Gathers whole rows from the ranks' columns; without widths, returns this rank's own rows.
inline UpdateInput join_columns(const paged_decoder_args& args, const int32_t* widths, const UpdateInput own, int cols,
                                const DecoderScratch& scratch) {
  if (widths == nullptr) return own;
  args.gather(args.group, own.data, own.stride, args.num_rows, widths, scratch.joined);
  return {scratch.joined, cols, cols};
}

// Whether rows of the residual stream itself are gathered, rather than of a branch that is added to it: one rank alone
// adds each product to the stream in the epilogue, and adapters' updates after it, and gathering the stream keeps that
// order.
inline bool joins_stream(const paged_layer& layer, const int32_t* widths) {
  return widths != nullptr && layer.attention_output_norm == nullptr && layer.parallel == 0;
}

// Combines the ranks' parts of the branch, or of the stream: gathers columns if the layer has widths, i.e. `last`, the
// matrix that produced them, has all columns of its input; else sums partial results.
inline void take_others(const paged_decoder_args& args, const paged_layer& layer, const int32_t* widths,
                        const paged_weight& last, const DecoderScratch& scratch, int hidden) {
  if (args.sum == nullptr) return;
  if (widths != nullptr) {
    float* const out = joins_stream(layer, widths) ? args.hidden : scratch.branch;
    args.gather(args.group, scratch.part, columns_of(layer, last), args.num_rows, layer.hidden_widths, out);
  } else {
    args.sum(args.group, scratch.branch, static_cast<int64_t>(args.num_rows) * hidden);
  }
}

// stream += branch, for parallel layers and for branches combined from several ranks.
inline auto add_whole(Job& job, const DecoderScratch& scratch, float* stream, int num_rows, int hidden) {
  return job.phase(num_rows, row_cost(hidden),
                   [branch = scratch.branch, stream, hidden](int64_t first, int64_t last, int) {
                     for (int64_t at = first * hidden; at < last * hidden; at += 16)
                       store_floats(stream + at, add(load_floats(stream + at), load_floats(branch + at)));
                   });
}

// Normalizes the rows of the residual stream and converts them to the form that a weight multiplies.
inline Task prepare_normed(Job& job, const paged_layer& layer, const paged_weight& weight, const Matrix input,
                           const float* norm, const float* bias, const DecoderScratch& scratch, const Operand out) {
  if (layer.norm != PAGED_LAYER_NORM || norm == nullptr) {
    co_await prepare_rows(job, weight, input, norm, layer.norm_eps, out);
    co_return;
  }
  const int hidden = weight.cols;
  co_await job.phase(out.num_rows, row_cost(hidden), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      normalize_layer(static_cast<const float*>(input.data) + row * hidden, hidden, norm, bias, layer.norm_eps,
                      scratch.normed + row * hidden);
  });
  co_await prepare_rows(job, weight, {scratch.normed, hidden, PAGED_FLOAT32}, nullptr, 0.0f, out);
}

inline Output plain_output(float* data, int64_t stride) { return {data, stride, PAGED_FLOAT32, {}}; }

// Runs the first part of a layer: computes queries, and new keys and values, which are written to the cache.
inline Task project_rows(Job& job, const paged_decoder_args& args, const AdaptedRows& adapted, int index,
                         const DecoderScratch& scratch, const ThreadSums& sums) {
  const paged_layer& layer = args.layers[index];
  const paged_heads& heads = layer.heads;
  const int64_t width = projected_width(layer);
  const Matrix input{args.hidden, layer.qkv[0].cols, PAGED_FLOAT32};
  const Operand normed = Operand::at(scratch.activations, layer.qkv[0], args.num_rows);
  co_await prepare_normed(job, layer, layer.qkv[0], input, layer.attention_norm, layer.attention_norm_bias, scratch,
                          normed);
  co_await multiply(job, layer.qkv, layer.num_qkv, normed, plain_output(scratch.projected, width), sums);
  if (adapted.change(index, PAGED_QKV, 3)) {
    const int hidden = layer.qkv[0].cols;
    float* const by_place = scratch.adapters.normed;
    co_await normalize_adapted(job, adapted, args.hidden, layer, layer.attention_norm, layer.attention_norm_bias,
                               by_place);
    co_await add_updates(job, adapted, index, PAGED_QKV, 3, {by_place, hidden, hidden, true}, scratch.projected, width,
                         scratch.adapters.shrunk);
  }

  const Placement placement{heads, layer.cache, args.batch, layer, args.ropes[layer.rope], args.slots};
  co_await job.phase(args.num_rows, row_cost(static_cast<int>(width)), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t)
      place_token(placement, scratch.projected + t * width, t, original_row(args, t));
  });
}

// How a layer's feed-forward network normalizes the residual stream, and where it writes its output.
struct MlpEnds {
  const float* norm;
  const float* bias;
  Output out;
};

// Multiplies into the residual stream or a buffer, and adds the adapters' updates.
inline Task multiply_adapted(Job& job, const AdaptedRows& adapted, int index, int projection, const paged_weight& weight,
                             const Operand rows, const UpdateInput x, const Output out, const AdapterScratch& own,
                             const ThreadSums& sums) {
  // An adapter with gains scales the product, so the product must not have been added to the stream yet. This applies
  // to the rows of all adapters: otherwise the order of their sums would depend on whether another adapter of the step
  // has gains.
  const bool changes = adapted.change(index, projection, 1), apart = changes && out.residual.data != nullptr;
  const Output to = apart ? plain_output(own.product, weight.rows) : out;
  co_await multiply(job, &weight, 1, rows, to, sums);
  if (!changes) co_return;
  co_await add_updates(job, adapted, index, projection, 1, x, static_cast<float*>(to.data), to.stride, own.shrunk);
  if (apart) co_await add_product(job, own.product, out, rows.num_rows, weight.rows);
}

// Runs the feed-forward network if adapters update it: gate and up are complete before the activation combines them.
inline Task run_adapted_mlp(Job& job, const paged_decoder_args& args, const AdaptedRows& adapted, int index,
                            const MlpEnds ends, const DecoderScratch& scratch, const ThreadSums& sums) {
  static_assert(offsetof(paged_layer, up) == offsetof(paged_layer, gate) + sizeof(paged_weight));
  const paged_layer& layer = args.layers[index];
  const paged_weight& first = first_of_mlp(layer);
  const int count = layer.gate.data != nullptr ? 2 : 1, first_projection = PAGED_GATE_UP + 2 - count;
  const int rows = args.num_rows, hidden = first.cols, inner = layer.up.rows, width = count * inner;
  const AdapterScratch& own = scratch.adapters;
  const Operand mlp_input = Operand::at(scratch.activations, first, rows);
  co_await prepare_normed(job, layer, first, {args.hidden, hidden, PAGED_FLOAT32}, ends.norm, ends.bias, scratch,
                          mlp_input);
  co_await multiply(job, &first, count, mlp_input, plain_output(own.gate_up, width), sums);
  if (adapted.change(index, first_projection, count)) {
    co_await normalize_adapted(job, adapted, args.hidden, layer, ends.norm, ends.bias, own.normed);
    co_await add_updates(job, adapted, index, first_projection, count, {own.normed, hidden, hidden, true}, own.gate_up,
                         width, own.shrunk);
  }
  co_await activate_rows(job, own.gate_up, inner, count == 2, layer.activation, rows);
  const UpdateInput joined =
      join_columns(args, layer.inner_widths, {own.gate_up, width, inner}, layer.down.cols, scratch);
  const Operand gated = Operand::at(scratch.activations, layer.down, rows);
  co_await prepare_rows(job, layer.down, {joined.data, joined.stride, PAGED_FLOAT32}, nullptr, 0.0f, gated);
  co_await multiply_adapted(job, adapted, index, PAGED_DOWN, layer.down, gated, joined, ends.out, own, sums);
}

// Adds what the layer has of a token besides its embedding to the stream, and multiplies the stream by the layer's
// scale.
inline Task add_layer_input(Job& job, const paged_decoder_args& args, const AdaptedRows& adapted, int index,
                            const DecoderScratch& scratch, const ThreadSums& sums) {
  const paged_layer& layer = args.layers[index];
  const int rows = args.num_rows, hidden = layer.input_gate.cols, size = layer.input_gate.rows;
  float *const stream = args.hidden, *const gated = scratch.gated;
  const Operand whole = Operand::at(scratch.activations, layer.input_gate, rows);
  co_await prepare_rows(job, layer.input_gate, {stream, hidden, PAGED_FLOAT32}, nullptr, 0.0f, whole);
  co_await multiply_adapted(job, adapted, index, PAGED_INPUT_GATE, layer.input_gate, whole, {stream, hidden, hidden},
                            plain_output(gated, size), scratch.adapters, sums);
  co_await job.phase(rows, row_cost(size), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      const float* input = args.layer_inputs + original_row(args, row) * args.layer_input_stride + layer.input_column;
      for (int c = 0; c < size; c += 16) {
        float* const at = gated + row * size + c;
        store_floats(at, mul(activate(load_floats(at), layer.activation), load_floats(input + c)));
      }
    }
  });
  const Operand inner = Operand::at(scratch.activations, layer.input_output, rows);
  co_await prepare_rows(job, layer.input_output, {gated, size, PAGED_FLOAT32}, nullptr, 0.0f, inner);
  co_await multiply_adapted(job, adapted, index, PAGED_INPUT_OUTPUT, layer.input_output, inner, {gated, size, size},
                            plain_output(scratch.branch, hidden), scratch.adapters, sums);
  co_await add_branch(job, scratch, stream, rows, hidden, layer.input_norm, layer.norm_eps, layer.scale);
}

// Runs the rest of a layer: attention and feed-forward.
inline Task finish_rows(Job& job, const paged_decoder_args& args, const AdaptedRows& adapted, int index,
                        const DecoderScratch& scratch, const ThreadSums& sums) {
  const paged_layer& layer = args.layers[index];
  const paged_heads& heads = layer.heads;
  const int rows = args.num_rows, hidden = layer.qkv[0].cols, queries = query_width(heads);
  float* const stream = args.hidden;
  const Matrix input{stream, hidden, PAGED_FLOAT32};
  const bool parallel = layer.parallel != 0;
  const bool normed = layer.attention_output_norm != nullptr, summed = args.sum != nullptr;
  const bool apart = normed || parallel || summed;
  const auto end_of = [&](const int32_t* widths, const paged_weight& last) {
    const Matrix own{stream + layer.first_hidden, hidden, PAGED_FLOAT32};
    const int columns = columns_of(layer, last);
    if (joins_stream(layer, widths)) return Output{scratch.part, columns, PAGED_FLOAT32, own};
    if (widths != nullptr) return plain_output(scratch.part, columns);
    return apart ? plain_output(scratch.branch, hidden) : Output{stream, hidden, PAGED_FLOAT32, input};
  };
  const AttentionPlan plan(heads, args.batch, args.num_threads);
  co_await attend_batch(job, plan, layer.cache, {scratch.projected, projected_width(layer), PAGED_FLOAT32},
                        plain_output(scratch.attended, queries), AttentionScratch::at(scratch.attention, plan));
  const UpdateInput joined =
      join_columns(args, layer.attended_widths, {scratch.attended, queries, queries}, layer.output.cols, scratch);
  const Operand attended = Operand::at(scratch.activations, layer.output, rows);
  const Output attention_end = end_of(layer.attended_widths, layer.output);
  co_await prepare_rows(job, layer.output, {joined.data, joined.stride, PAGED_FLOAT32}, nullptr, 0.0f, attended);
  co_await multiply_adapted(job, adapted, index, PAGED_OUTPUT, layer.output, attended, joined, attention_end,
                            scratch.adapters, sums);
  if (!parallel) {
    take_others(args, layer, layer.attended_widths, layer.output, scratch, hidden);
    if (summed && !normed && !joins_stream(layer, layer.attended_widths))
      co_await add_whole(job, scratch, stream, rows, hidden);
  }
  co_await add_branch(job, scratch, stream, rows, hidden, layer.attention_output_norm, layer.norm_eps);

  MlpEnds ends{layer.mlp_norm, layer.mlp_norm_bias, end_of(layer.inner_widths, layer.down)};
  if (parallel) {
    ends = {layer.attention_norm, layer.attention_norm_bias, attention_end};
    ends.out.residual = {attention_end.data, attention_end.stride, PAGED_FLOAT32};
  }
  if (layer.router.weight != nullptr) {
    co_await run_mixture(job, args, layer, stream, ends.out, scratch.mixture);
  } else if (adapted.change(index, PAGED_GATE_UP, 3)) {
    co_await run_adapted_mlp(job, args, adapted, index, ends, scratch, sums);
  } else {
    const paged_weight& up = first_of_mlp(layer);
    const int inner = layer.up.rows;
    const Operand mlp_input = Operand::at(scratch.activations, up, rows);
    co_await prepare_normed(job, layer, up, input, ends.norm, ends.bias, scratch, mlp_input);
    const bool ready = layer.gate.data != nullptr && layer.inner_widths == nullptr &&
                       takes_hidden_as_it_comes(layer.gate, layer.down);
    uint8_t* const memory = ready ? reinterpret_cast<uint8_t*>(scratch.gated) : scratch.activations;
    const Operand gated = Operand::at(memory, layer.down, rows);
    if (layer.gate.data == nullptr) {
      co_await multiply(job, &layer.up, 1, mlp_input, plain_output(scratch.gated, inner), sums);
      co_await activate_rows(job, scratch.gated, inner, false, layer.activation, rows);
    } else {
      co_await multiply_gated(job, layer.gate, layer.up, layer.down, ready, mlp_input, layer.activation, scratch.gated,
                              sums);
    }
    if (!ready) {
      const UpdateInput whole =
          join_columns(args, layer.inner_widths, {scratch.gated, inner, inner}, layer.down.cols, scratch);
      co_await prepare_rows(job, layer.down, {whole.data, whole.stride, PAGED_FLOAT32}, nullptr, 0.0f, gated);
    }
    co_await multiply(job, &layer.down, 1, gated, ends.out, sums);
  }
  take_others(args, layer, layer.inner_widths, layer.down, scratch, hidden);
  if (parallel || (summed && !normed && !joins_stream(layer, layer.inner_widths)))
    co_await add_whole(job, scratch, stream, rows, hidden);
  const bool has_input = layer.input_gate.data != nullptr;
  co_await add_branch(job, scratch, stream, rows, hidden, layer.mlp_output_norm, layer.norm_eps,
                      has_input ? 1.0f : layer.scale);
  if (has_input) co_await add_layer_input(job, args, adapted, index, scratch, sums);
}

// Runs all layers. The last one that has keys computes keys and values of all rows, for later steps. The rest of it, and
// layers after it, which share keys, are computed only for rows that are read: for a prompt's chunk, one or none.
inline Task run_layers(Job& job, const paged_decoder_args& args, const DecoderScratch& scratch,
                       const ThreadSums& sums) {
  paged_decoder_args read = only_read(args);
  const bool reads_all = read.num_rows == args.num_rows;
  int last_with_keys = args.num_layers - 1;
  while (last_with_keys >= 0 && args.layers[last_with_keys].shares_keys != 0) --last_with_keys;
  const AdapterScratch& own = scratch.adapters;
  AdaptedRows adapted, adapted_read;
  if (args.num_adapters > 0) adapted = AdaptedRows::sorted(args, args.adapter_of_row, args.num_rows, own.sorted);
  if (!reads_all) {
    read.hidden = scratch.read;
    read.original_rows = scratch.original_rows;
    if (args.num_adapters > 0) {
      gather_adapters(args, own.of_read);
      adapted_read = AdaptedRows::sorted(args, own.of_read, read.num_rows, own.sorted_read);
    }
  }
  bool is_read = reads_all;  // whether the stream is that of the rows that are read
  for (int i = 0; i < args.num_layers; ++i) {
    const paged_layer& layer = args.layers[i];
    const int hidden = layer.qkv[0].cols;
    const bool only_queries = !reads_all && i > last_with_keys;
    if (only_queries) {
      if (read.num_rows == 0) break;
      if (!is_read) gather_read(args, layer, hidden, nullptr, scratch.read, scratch.original_rows);
      is_read = true;
      co_await project_rows(job, read, adapted_read, i, scratch, sums);
    } else {
      co_await project_rows(job, args, adapted, i, scratch, sums);
    }
    if (reads_all || i < last_with_keys) {
      co_await finish_rows(job, args, adapted, i, scratch, sums);
      continue;
    }
    if (read.num_rows == 0) break;
    if (!is_read) gather_read(args, layer, hidden, scratch.projected, scratch.read, scratch.original_rows);
    is_read = true;
    co_await finish_rows(job, read, adapted_read, i, scratch, sums);
  }
  if (!reads_all && is_read) scatter_read(args, args.layers[0].qkv[0].cols, scratch.read);
}

}  // namespace
}  // namespace paged
