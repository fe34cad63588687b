// Multiplies each head of some rows with the head's own matrix, as latent attention does with queries and results; or
// the same rows with the matrices of several heads, whose results may lie apart.
#pragma once

#include "product.h"

namespace paged {
namespace {

// The matrices of some heads, concatenated by rows.
struct HeadWeights {
  paged_weight first;  // that of the first head
  int64_t bytes;       // of one head
  int count;

  HeadWeights(const paged_weight& all, int num_heads) : first(all), count(num_heads) {
    first.rows /= num_heads;
    bytes = num_panels(first.rows) *
            (is_dense(all.format) ? dense_panel_bytes(all.format, all.cols) : panel_kernel(all).panel_bytes);
  }
  paged_weight of(int64_t head) const {
    paged_weight weight = first;
    weight.data += head * bytes;
    return weight;
  }
  // Returns those of `num` heads from `head` on.
  HeadWeights part(int64_t head, int num) const {
    HeadWeights out = *this;
    out.first = of(head), out.count = num;
    return out;
  }
};

// Vectors of heads: that of row m and head h begins at element m * stride + h * head_stride.
struct HeadVectors {
  void* data;
  int64_t stride;
  int64_t head_stride;  // of inputs 0: all heads have the same
  int32_t dtype;

  void* of_head(int64_t head) const {
    return static_cast<uint8_t*>(data) + head * head_stride * (dtype == PAGED_FLOAT32 ? 4 : 2);
  }
};

// Scratch memory: each head's rows in the form that its matrix multiplies, once if all heads have the same rows.
struct HeadScratch {
  uint8_t* rows;
  size_t bytes;  // of one head's rows
  ThreadSums sums;

  static HeadScratch at(Arena& arena, const HeadWeights& weights, int num_inputs, int num_rows, int num_threads) {
    HeadScratch out{};
    out.bytes = line_aligned(Operand::bytes(weights.first, num_rows, num_threads));
    out.rows = arena.take<uint8_t>(out.bytes * num_inputs);
    out.sums.bytes = ThreadSums::bytes_of(num_rows);
    out.sums.data = arena.take<uint8_t>(out.sums.bytes * num_threads);
    return out;
  }
};

// Calls take(head, first, last) for each head that has some of the items [first, last), `count` per head.
template <class Take>
inline void for_heads(int64_t first, int64_t last, int64_t count, const Take& take) {
  for (int64_t head = first / count; head * count < last; ++head)
    take(head, std::max(first - head * count, int64_t{0}), std::min(last - head * count, count));
}

// out[m, h] = W_h . x[m, h] for num_rows rows.
inline Task multiply_heads(Job& job, const HeadWeights weights, const HeadVectors x, const HeadVectors out,
                           int num_rows, const HeadScratch scratch) {
  const int num_inputs = x.head_stride == 0 ? 1 : weights.count;
  const auto rows_of = [&](int64_t head) {
    return Operand::at(scratch.rows + (num_inputs == 1 ? 0 : head) * scratch.bytes, weights.first, num_rows);
  };
  const int together = prepared_together(weights.first);
  const int64_t tiles = (num_rows + together - 1) / together;
  co_await job.phase(num_inputs * tiles, together * row_cost(weights.first.cols),
                     [&](int64_t first, int64_t last, int) {
                       for_heads(first, last, tiles, [&](int64_t head, int64_t begin, int64_t end) {
                         const Matrix input{x.of_head(head), x.stride, x.dtype};
                         prepare_tiles(weights.first, input, nullptr, 0.0f, rows_of(head), begin, end);
                       });
                     });
  const Product one(&weights.first, 1, rows_of(0), {}, scratch.sums);
  co_await job.phase(weights.count * one.units(), one.cost(), [&](int64_t first, int64_t last, int thread) {
    for_heads(first, last, one.units(), [&](int64_t head, int64_t begin, int64_t end) {
      const paged_weight weight = weights.of(head);
      const Output to{out.of_head(head), out.stride, out.dtype, {}};
      Product(&weight, 1, rows_of(head), to, scratch.sums)(begin, end, thread);
    });
  });
}

}  // namespace
}  // namespace paged
