// Multiplies each head of some rows with the head's own matrix, as latent attention does with queries and results; or
// the same rows with the matrices of several heads, whose results may lie apart.
#pragma once

#include "product.h"

namespace paged {
namespace {

// The matrices of the heads, concatenated by rows.
struct HeadWeights {
  paged_weight first;  // that of the first head
  int64_t bytes;       // of one head

  HeadWeights(const paged_weight& all, int num_heads) : first(all) {
    first.rows /= num_heads;
    bytes = num_panels(first.rows) *
            (is_dense(all.format) ? dense_panel_bytes(all.format, all.cols) : panel_kernel(all).panel_bytes);
  }
  paged_weight of(int64_t head) const {
    paged_weight weight = first;
    weight.data += head * bytes;
    return weight;
  }
};

// Scratch memory: each head's rows in the form that its matrix multiplies, once if all heads have the same rows.
struct HeadScratch {
  uint8_t* rows;
  size_t bytes;  // of one head's rows
  ThreadSums sums;

  static int num_inputs(const paged_head_product_args& args) { return args.x_head_stride == 0 ? 1 : args.num_heads; }

  static HeadScratch at(Arena& arena, const paged_head_product_args& args) {
    HeadScratch out{};
    out.bytes = line_aligned(
        Operand::bytes(HeadWeights(args.weight, args.num_heads).first, args.num_rows, args.num_threads));
    out.rows = arena.take<uint8_t>(out.bytes * num_inputs(args));
    out.sums.bytes = ThreadSums::bytes_of(args.num_rows);
    out.sums.data = arena.take<uint8_t>(out.sums.bytes * args.num_threads);
    return out;
  }
  static size_t bytes_of(const paged_head_product_args& args) {
    Arena arena(nullptr);
    at(arena, args);
    return arena.used();
  }
};

inline void* elements_from(const void* data, int64_t first, int32_t dtype) {
  return static_cast<uint8_t*>(const_cast<void*>(data)) + first * (dtype == PAGED_FLOAT32 ? 4 : 2);
}

// Calls take(head, first, last) for each head that has some of the items [first, last), `count` per head.
template <class Take>
inline void for_heads(int64_t first, int64_t last, int64_t count, const Take& take) {
  for (int64_t head = first / count; head * count < last; ++head)
    take(head, std::max(first - head * count, int64_t{0}), std::min(last - head * count, count));
}

inline Task run_head_product(Job& job, const paged_head_product_args& args, const HeadScratch scratch) {
  const HeadWeights weights(args.weight, args.num_heads);
  const auto rows_of = [&](int64_t head) {
    const int64_t input = args.x_head_stride == 0 ? 0 : head;
    return Operand::at(scratch.rows + input * scratch.bytes, weights.first, args.num_rows);
  };
  const int together = prepared_together(weights.first);
  const int64_t tiles = (args.num_rows + together - 1) / together;
  co_await job.phase(HeadScratch::num_inputs(args) * tiles, together * row_cost(weights.first.cols),
                     [&](int64_t first, int64_t last, int) {
                       for_heads(first, last, tiles, [&](int64_t head, int64_t begin, int64_t end) {
                         const Matrix x{elements_from(args.x, head * args.x_head_stride, args.dtype), args.x_stride,
                                        args.dtype};
                         prepare_tiles(weights.first, x, nullptr, 0.0f, rows_of(head), begin, end);
                       });
                     });
  const Product one(&weights.first, 1, rows_of(0), {}, scratch.sums);
  co_await job.phase(args.num_heads * one.units(), one.cost(), [&](int64_t first, int64_t last, int thread) {
    for_heads(first, last, one.units(), [&](int64_t head, int64_t begin, int64_t end) {
      const paged_weight weight = weights.of(head);
      const Output out{elements_from(args.out, head * args.out_head_stride, args.dtype), args.out_stride, args.dtype,
                       {}};
      Product(&weight, 1, rows_of(head), out, scratch.sums)(begin, end, thread);
    });
  });
}

}  // namespace
}  // namespace paged
