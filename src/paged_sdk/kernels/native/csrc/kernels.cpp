// Compiled once per instruction set (setup.py gives the flags and PAGED_TABLE): one parallel region per call, whose
// phases are the building blocks of the headers with barriers between them.
#include "kernels.h"

#include "decoder.h"
#include "experts.h"
#include "pages.h"
#include "quantize.h"
#include "hadamard_weight.h"
#include "rows.h"

namespace paged {
namespace {

constexpr int kOk = 0;
constexpr int kNoMemory = 1;
constexpr int kNotFinite = 2;
constexpr int kNoSuchExpert = 3;
constexpr int kNoSuchRow = 3;

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
  const paged_weight& weight = args.weights[0];
  const size_t activations = Operand::bytes(weight, args.num_rows, args.num_threads);
  const size_t sums = line_aligned(kSumPanels * sums_bytes(args.num_rows));
  uint8_t* scratch = reserve(*args.workspace, activations + sums * args.num_threads);
  if (scratch == nullptr) return kNoMemory;
  const Matrix x{args.x, args.x_stride, args.dtype};
  const Output out{args.out, args.out_stride, args.dtype, {args.residual, args.residual_stride, args.dtype}};
  run_team(*args.workspace, args.num_threads, [&](const Team& team) {
    const Operand rows = prepare_rows(weight, x, args.num_rows, args.norm_weight, args.norm_eps, scratch, team);
    auto* own = reinterpret_cast<float (*)[kPanelRows]>(scratch + activations + team.index * sums);
    multiply(args.weights, args.num_weights, rows, out, own, team);
  });
  return kOk;
}

int experts(const paged_experts_args& args) {
  const ExpertsScratch::Sizes sizes(args);
  uint8_t* memory = reserve(*args.workspace, sizes.total(args.num_threads));
  if (memory == nullptr) return kNoMemory;
  const ExpertsScratch scratch = ExpertsScratch::at(memory, sizes, args.num_threads);
  if (!all_exist(args)) return kNoSuchExpert;
  const Output out{args.out, args.out_stride, args.dtype, {}};
  run_team(*args.workspace, args.num_threads, [&](const Team& team) { run_experts(args, out, scratch, team); });
  return kOk;
}

int attention(const paged_attention_args& args) {
  const AttentionPlan plan(args.heads, args.batch, args.num_threads);
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
    float* stream = stream_of(args, scratch, team);
    for (int i = 0; i < args.num_layers; ++i) run_layer(args, args.layers[i], stream, scratch, sums, team);
  });
  return kOk;
}

int rotate(const paged_hadamard_args& args) {
  const int64_t panels = num_panels(args.rows);
  advise_huge_pages(args.out, panels * hadamard_panel_bytes(args.cols));
  bool done = true;
#pragma omp parallel num_threads(args.num_threads) reduction(&& : done)
  {
    auto* own = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * kPanelRows * args.cols));
    done = own != nullptr;
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
      if (own != nullptr) hadamard_panel(args, panel, own);
    std::free(own);
  }
  return done ? kOk : kNoMemory;
}

int quantize(const paged_quantize_args& args) {
  const BlockForm& form = *block_form(args.format);
  const int64_t row_bytes = static_cast<int64_t>(args.cols / form.layout->block_cols()) * form.block_bytes;
  bool finite = true;
#pragma omp parallel for num_threads(args.num_threads) schedule(dynamic, 16) reduction(&& : finite)
  for (int64_t row = 0; row < args.rows; ++row)
    finite = quantize_weights(args, form, row, args.out + row * row_bytes) && finite;
  return finite ? kOk : kNotFinite;
}

int rows(const paged_rows_args& args) {
  for (int i = 0; i < args.num_rows; ++i)
    if (args.rows[i] < 0 || args.rows[i] >= args.weight->rows) return kNoSuchRow;
  const int threads = args.num_rows < args.num_threads ? args.num_rows : args.num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int i = 0; i < args.num_rows; ++i)
    decode_row(*args.weight, args.rows[i], args.out + static_cast<int64_t>(i) * args.weight->cols);
  return kOk;
}

}  // namespace

extern const KernelTable PAGED_TABLE{linear, experts, attention, decoder, rotate, quantize, rows};

}  // namespace paged
