// Compiled once per instruction set (setup.py gives the flags and PAGED_TABLE): one parallel region per call, whose
// phases are the building blocks of the headers with barriers between them.
#include "kernels.h"

#include "decoder.h"
#include "epilogue.h"
#include "quantise.h"
#include "rotation.h"

namespace paged {
namespace {

constexpr int kOk = 0;
constexpr int kNoMemory = 1;
constexpr int kNotFinite = 2;

// Runs body(team) on the threads of the pool; on this thread alone where one is asked for.
template <class Body>
void run_team(paged_workspace& workspace, int num_threads, const Body& body) {
  if (num_threads == 1) {
    body(Team{workspace, 0, 1});
    return;
  }
#pragma omp parallel num_threads(num_threads)
  body(Team{workspace, omp_get_thread_num(), omp_get_num_threads()});
}

int linear(const paged_linear_args& args) {
  const int cols = args.weights[0].cols;
  const size_t activations = activation_bytes(args.num_rows, cols, args.num_threads);
  const size_t sums = sums_bytes(args.num_rows);
  uint8_t* scratch = reserve(*args.workspace, activations + sums * args.num_threads);
  if (scratch == nullptr) return kNoMemory;
  const Matrix x{args.x, args.x_stride, args.dtype};
  const Output out{args.out, args.out_stride, args.dtype, {args.residual, args.residual_stride, args.dtype}};
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    const Activations quantised = quantise_rows(x, args.num_rows, cols, args.norm_weight, args.norm_eps, scratch, team);
    auto* own = reinterpret_cast<float (*)[kPanelRows]>(scratch + activations + team.index * sums);
    multiply_weights(args.weights, args.num_weights, quantised, out, own, team);
  });
  return kOk;
}

int mlp(const paged_mlp_args& args) {
  const int cols = args.gate->cols, inner = args.gate->rows;
  const size_t widest = static_cast<size_t>(cols > inner ? cols : inner);
  const size_t activations = activation_bytes(args.num_rows, static_cast<int>(widest), args.num_threads);
  const size_t hidden_bytes = line_aligned(sizeof(float) * args.num_rows * inner);
  const size_t sums = 2 * sums_bytes(args.num_rows);
  uint8_t* scratch = reserve(*args.workspace, activations + hidden_bytes + sums * args.num_threads);
  if (scratch == nullptr) return kNoMemory;
  auto* hidden = reinterpret_cast<float*>(scratch + activations);
  const Matrix x{args.x, args.x_stride, args.dtype};
  const Matrix gated{hidden, inner, PAGED_FLOAT32};
  const Output out{args.out, args.out_stride, args.dtype, {args.residual, args.residual_stride, args.dtype}};
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    auto* own = reinterpret_cast<float (*)[kPanelRows]>(scratch + activations + hidden_bytes + team.index * sums);
    const Activations first = quantise_rows(x, args.num_rows, cols, args.norm_weight, args.norm_eps, scratch, team);
    multiply_gated(*args.gate, *args.up, first, args.activation, hidden, own, team);
    team.barrier();
    const Activations second = quantise_rows(gated, args.num_rows, inner, nullptr, 0.0f, scratch, team);
    multiply_weights(args.down, 1, second, out, own, team);
  });
  return kOk;
}

int attention(const paged_attention_args& args) {
  const AttentionPlan plan(args.heads, args.batch);
  uint8_t* memory = reserve(*args.workspace, AttentionScratch::bytes(plan, args.num_threads));
  if (memory == nullptr) return kNoMemory;
  const AttentionScratch scratch = AttentionScratch::at(memory, plan);
  scratch.offsets.fill(plan);
  args.workspace->next_item.store(0, std::memory_order_relaxed);
  const Matrix query{args.query, args.query_stride, args.dtype};
  const Output out{args.out, args.out_stride, args.dtype, {}};
  run_team(*args.workspace, args.num_threads,
           [&](const Team& team) { attend_batch(plan, args.cache, query, out, scratch, team); });
  return kOk;
}

int decoder(const paged_decoder_args& args) {
  const DecoderScratch::Sizes sizes(args);
  uint8_t* memory = reserve(*args.workspace, sizes.total(args.num_threads));
  if (memory == nullptr) return kNoMemory;
  const DecoderScratch scratch = DecoderScratch::at(memory, sizes, args.num_threads);
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    auto* sums = reinterpret_cast<float (*)[kPanelRows]>(scratch.sums + team.index * sizes.sums);
    for (int i = 0; i < args.num_layers; ++i) run_layer(args, args.layers[i], scratch, sums, team);
  });
  return kOk;
}

int rotate(const paged_rotate_args& args) {
  const size_t row_bytes = line_aligned(sizeof(float) * args.cols);
  uint8_t* scratch = reserve(*args.workspace, row_bytes * args.num_threads);
  if (scratch == nullptr) return kNoMemory;
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    rotate_rows(args, reinterpret_cast<float*>(scratch + team.index * row_bytes), team);
  });
  return kOk;
}

int finish(const paged_finish_args& args) {
  run_team(*args.workspace, args.num_threads, [&](const Team& team) { finish_rows(args, team); });
  return kOk;
}

int place(const paged_place_args& args) {
  const paged_heads& heads = args.placement.heads;
  const size_t row_bytes = line_aligned(sizeof(float) * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size);
  uint8_t* scratch = reserve(*args.workspace, row_bytes * args.num_threads);
  if (scratch == nullptr) return kNoMemory;
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    place_rows(args, reinterpret_cast<float*>(scratch + team.index * row_bytes), team);
  });
  return kOk;
}

int quantise(const paged_quantise_args& args) {
  const BlockForm& form = *block_form(args.format);
  const int64_t row_bytes = static_cast<int64_t>(args.cols / (form.layout->groups * kGroup)) * form.block_bytes;
  bool finite = true;
#pragma omp parallel for num_threads(args.num_threads) schedule(dynamic, 16) reduction(&& : finite)
  for (int64_t row = 0; row < args.rows; ++row)
    finite = quantise_weights(args, form, row, args.out + row * row_bytes) && finite;
  return finite ? kOk : kNotFinite;
}

}  // namespace

extern const KernelTable PAGED_TABLE{linear, mlp, attention, decoder, rotate, finish, place, quantise};

}  // namespace paged
