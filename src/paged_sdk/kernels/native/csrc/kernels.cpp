// Compiled once per ISA level (setup.py sets the flags and PAGED_TABLE). A call is one job (pool.h), whose phases are
// the building blocks in the headers.
#include "kernels.h"

#include <atomic>
#include <cstdlib>

#include "argmax.h"
#include "decoder.h"
#include "draw.h"
#include "experts.h"
#include "head_product.h"
#include "logprobs.h"
#include "pack_dense.h"
#include "pages.h"
#include "quantize_groups.h"
#include "rows.h"
#include "step_inputs.h"
#include "workspace.h"

namespace paged {
namespace {

constexpr int kOk = 0;
constexpr int kNoMemory = 1;
constexpr int kNotFinite = 2;
constexpr int kNoSuchExpert = 3;
constexpr int kNoSuchRow = 3;

int total_rows(const paged_linear_args& args) {
  int rows = 0;
  for (int i = 0; i < args.num_weights; ++i) rows += args.weights[i].rows;
  return rows;
}

Task run_linear(Job& job, const paged_linear_args& args, const Operand& rows, const ThreadSums& sums) {
  const Output out{args.out, args.out_stride, args.dtype, {args.residual, args.residual_stride, args.dtype}};
  co_await prepare_rows(job, args.weights[0], {args.x, args.x_stride, args.dtype}, args.norm_weight, args.norm_eps,
                        rows);
  co_await multiply(job, args.weights, args.num_weights, rows, out, sums);
  if (args.likeliest == nullptr) co_return;
  const int cols = total_rows(args);
  co_await job.phase(args.num_rows, row_cost(cols), [&args, cols](int64_t first, int64_t last, int) {
    const float* const numbers = static_cast<const float*>(args.out);
    for (int64_t row = first; row < last; ++row) args.likeliest[row] = argmax_of(numbers + row * args.out_stride, cols);
  });
}

// Scratch memory of a linear layer.
struct LinearScratch {
  float* outputs;  // [num_rows, cols], if the caller does not want them
  int64_t cols;
  uint8_t* activations;
  ThreadSums sums;

  static LinearScratch at(Arena& arena, const paged_linear_args& args) {
    LinearScratch out{};
    out.cols = args.out == nullptr ? total_rows(args) : 0;
    out.outputs = arena.take<float>(static_cast<size_t>(out.cols) * args.num_rows);
    out.activations = arena.take<uint8_t>(Operand::bytes(args.weights[0], args.num_rows, args.num_threads));
    out.sums.bytes = ThreadSums::bytes_of(args.num_rows);
    out.sums.data = arena.take<uint8_t>(out.sums.bytes * args.num_threads);
    return out;
  }
  static size_t bytes(const paged_linear_args& args) {
    Arena arena(nullptr);
    at(arena, args);
    return arena.used();
  }
};

int linear(const paged_linear_args& given) {
  uint8_t* memory = reserve(*given.workspace, LinearScratch::bytes(given));
  if (memory == nullptr) return kNoMemory;
  Arena arena(memory);
  const LinearScratch scratch = LinearScratch::at(arena, given);
  paged_linear_args args = given;
  if (scratch.cols > 0) args.out = scratch.outputs, args.out_stride = scratch.cols;
  const Operand rows = Operand::at(scratch.activations, args.weights[0], args.num_rows);
  run_job(args.num_threads, [&](Job& job) { return run_linear(job, args, rows, scratch.sums); });
  return kOk;
}

int head_product(const paged_head_product_args& args) {
  const HeadWeights weights(args.weight, args.num_heads);
  const int num_inputs = args.x_head_stride == 0 ? 1 : args.num_heads;
  Arena measured(nullptr);
  HeadScratch::at(measured, weights, num_inputs, args.num_rows, args.num_threads);
  uint8_t* memory = reserve(*args.workspace, measured.used());
  if (memory == nullptr) return kNoMemory;
  Arena arena(memory);
  const HeadScratch scratch = HeadScratch::at(arena, weights, num_inputs, args.num_rows, args.num_threads);
  const HeadVectors x{const_cast<void*>(args.x), args.x_stride, args.x_head_stride, args.dtype};
  const HeadVectors out{args.out, args.out_stride, args.out_head_stride, args.dtype};
  run_job(args.num_threads,
          [&](Job& job) { return multiply_heads(job, weights, x, out, args.num_rows, scratch); });
  return kOk;
}

int experts(const paged_experts_args& args) {
  uint8_t* memory = reserve(*args.workspace, ExpertsScratch::bytes(args, args.num_threads));
  if (memory == nullptr) return kNoMemory;
  Arena arena(memory);
  const ExpertsScratch scratch = ExpertsScratch::at(arena, args, args.num_threads);
  if (!all_exist(args)) return kNoSuchExpert;
  const Output out{args.out, args.out_stride, args.dtype, {}};
  run_job(args.num_threads, [&](Job& job) { return run_experts(job, args, out, scratch); });
  return kOk;
}

int route(const paged_route_args& args) {
  uint8_t* memory = reserve(*args.workspace, RouteScratch::bytes(args.choice, args.num_threads));
  if (memory == nullptr) return kNoMemory;
  Arena arena(memory);
  const RouteScratch scratch = RouteScratch::at(arena, args.choice, args.num_threads);
  parallel_for(args.num_threads, args.num_tokens, choice_cost(args.choice),
               [&](int64_t first, int64_t last, int thread) {
                 for (int64_t token = first; token < last; ++token) route_token(args, scratch, token, thread);
               });
  return kOk;
}

int attention(const paged_attention_args& args) {
  const AttentionPlan plan(args.heads, args.batch, args.num_threads);
  uint8_t* memory = reserve(*args.workspace, AttentionScratch::bytes(plan, args.num_threads));
  if (memory == nullptr) return kNoMemory;
  const AttentionScratch scratch = AttentionScratch::at(memory, plan);
  const Matrix query{args.query, args.query_stride, args.dtype};
  const Output out{args.out, args.out_stride, args.dtype, {}};
  run_job(args.num_threads, [&](Job& job) { return attend_batch(job, plan, args.cache, query, out, scratch); });
  return kOk;
}

Task run_decoder(Job& job, const paged_decoder_args& args, const StepRopes& ropes, const DecoderScratch& scratch) {
  co_await make_inputs(job, args, ropes);
  const paged_decoder_args whole = ropes.of(args);
  co_await run_layers(job, whole, scratch, {scratch.sums, ThreadSums::bytes_of(args.num_rows)});
}

int decoder(const paged_decoder_args& args) {
  if (has_unknown_token(args)) return kNoSuchRow;
  const DecoderScratch::Sizes sizes(args);
  uint8_t* memory = reserve(*args.workspace, StepRopes::bytes(args) + DecoderScratch::bytes(sizes, args));
  if (memory == nullptr) return kNoMemory;
  Arena arena(memory);
  const StepRopes ropes = StepRopes::at(arena, args);
  const DecoderScratch scratch = DecoderScratch::at(arena, sizes, args);
  run_job(args.num_threads, [&](Job& job) { return run_decoder(job, args, ropes, scratch); });
  return kOk;
}

int quantize(const paged_quantize_args& args) {
  const BlockForm& form = *block_form(args.format);
  const int64_t row_bytes = static_cast<int64_t>(args.cols / form.layout->block_cols()) * form.block_bytes;
  std::atomic<bool> finite{true};
  parallel_for(args.num_threads, args.rows, int64_t{5000} * args.cols, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      if (!quantize_weights(args, form, row, args.out + row * row_bytes)) finite.store(false);
  });
  return finite.load() ? kOk : kNotFinite;
}

int pack_dense(const paged_dense_args& args) {
  const int64_t panels = num_panels(args.rows), pitch = dense_panel_bytes(args.format, args.cols);
  advise_huge_pages(args.out, panels * pitch);
  parallel_for(args.num_threads, panels, 50 * pitch, [&](int64_t first, int64_t last, int) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t row = p * kPanelRows, left = args.rows - row;
      write_dense_panel(args, row, static_cast<int>(left < kPanelRows ? left : kPanelRows), args.out + p * pitch);
    }
  });
  return kOk;
}

int quantize_groups(const paged_quantize_groups_args& args) {
  std::atomic<bool> finite{true};
  parallel_for(args.num_threads, args.rows, int64_t{2000} * args.cols, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      if (!quantize_groups_of_row(args, row)) finite.store(false);
  });
  return finite.load() ? kOk : kNotFinite;
}

int rows(const paged_rows_args& args) {
  for (int i = 0; i < args.num_rows; ++i)
    if (args.rows[i] < 0 || args.rows[i] >= args.weight->rows) return kNoSuchRow;
  const int64_t cost = 2 * row_cost(args.weight->cols);
  parallel_for(args.num_threads, args.num_rows, cost, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) decode_row(*args.weight, args.rows[i], args.out + i * args.weight->cols);
  });
  return kOk;
}

int norm(const paged_norm_args& args) {
  const int cols = args.cols;
  parallel_for(args.num_threads, args.rows, row_cost(cols), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row)
      normalize_into(args.norm, args.x + row * cols, cols, args.weight, args.bias, args.eps, args.out + row * cols);
  });
  return kOk;
}

int argmax(const paged_argmax_args& args) {
  parallel_for(args.num_threads, args.rows, row_cost(args.cols), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) args.out[row] = argmax_of(args.x + row * args.x_stride, args.cols);
  });
  return kOk;
}

int draw(const paged_draw_args& args) {
  const size_t own = DrawScratch::bytes(args.vocab_size);
  if (args.num_rows == 0) return kOk;
  const int num_threads = args.num_threads < args.num_rows ? args.num_threads : args.num_rows;
  uint8_t* memory = reserve(*args.workspace, own * num_threads);
  if (memory == nullptr) return kNoMemory;
  parallel_for(num_threads, args.num_rows, draw_cost(args.vocab_size),
               [&](int64_t first, int64_t last, int thread) {
                 Arena arena(memory + own * thread);
                 const DrawScratch scratch = DrawScratch::at(arena, args.vocab_size);
                 for (int64_t row = first; row < last; ++row) draw_row(args, row, scratch);
               });
  return kOk;
}

int logprobs(const paged_logprobs_args& args) {
  if (args.num_rows == 0) return kOk;
  const int num_threads = args.num_threads < args.num_rows ? args.num_threads : args.num_rows;
  const size_t own = LogprobScratch::bytes(args.vocab_size);
  Arena measured(nullptr);
  measured.take<LogNormalizer>(args.num_rows);
  uint8_t* memory = reserve(*args.workspace, measured.used() + own * num_threads);
  if (memory == nullptr) return kNoMemory;
  Arena shared(memory);
  auto* const normalizers = shared.take<LogNormalizer>(args.num_rows);
  uint8_t* const owned = memory + shared.used();
  const int64_t cost = logprobs_cost(args.vocab_size);
  parallel_for(num_threads, args.num_rows, cost, [&](int64_t first, int64_t last, int thread) {
    Arena arena(owned + own * thread);
    const LogprobScratch scratch = LogprobScratch::at(arena, args.vocab_size);
    for (int64_t row = first; row < last; ++row) normalizers[row] = find_logprobs(args, row, scratch);
  });
  for (int64_t i = 0; i < args.num_chosen; ++i) {
    const int64_t row = args.chosen_rows[i];
    args.chosen_logprobs[i] = normalizers[row].logprob_of(args.logits[row * args.stride + args.chosen_tokens[i]]);
  }
  return kOk;
}

int short_conv(const paged_short_conv_args& args) {
  run_job(args.num_threads, [&](Job& job) { return convolve(job, args); });
  return kOk;
}

int gated_delta(const paged_gated_delta_args& args) {
  run_job(args.num_threads, [&](Job& job) { return apply_gated_delta(job, args); });
  return kOk;
}

int mamba2(const paged_mamba2_args& args) {
  run_job(args.num_threads, [&](Job& job) { return scan(job, args); });
  return kOk;
}

}  // namespace

extern const KernelTable PAGED_TABLE{gains_in_hadamard, linear, head_product, experts, route, attention, decoder,
                                     quantize, quantize_groups, rows, norm, argmax, draw, logprobs, short_conv,
                                     gated_delta, mamba2, pack_dense};

}  // namespace paged
