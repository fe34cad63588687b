// Multiplies with weights of every form: packed (linear.h), Hadamard (hadamard_product.h) or dense (dense_product.h),
// so that callers need not distinguish them. Each function returns a phase of a job (pool.h).
#pragma once

#include "dense_product.h"
#include "hadamard_product.h"
#include "pool.h"

namespace paged {
namespace {

inline bool is_hadamard(const paged_weight& weight) { return weight.in_hadamard != 0; }

// Whether the Hadamard form is faster for many rows, with weights of a packed format.
inline bool gains_in_hadamard(int32_t format) {
  return with_format(format, [](auto of) { return kGainsInHadamard<decltype(of)>; });
}

// Whether weights multiply the same form of an input.
inline bool share_input(const paged_weight& a, const paged_weight& b) {
  const bool dense = is_dense(a.format) || is_dense(b.format);
  return a.order == b.order && is_hadamard(a) == is_hadamard(b) && (!dense || a.format == b.format);
}

// Activations in the form that a weight multiplies, and every other weight with the same input.
struct Operand {
  Activations groups;     // for packed weights
  HadamardRows hadamard;  // for weights in the Hadamard form
  DenseRows dense;        // for dense weights
  int num_rows;

  static size_t bytes(const paged_weight& weight, int num_rows, int num_threads) {
    if (is_hadamard(weight)) return HadamardRows::bytes(num_rows, weight.cols, num_threads);
    return is_dense(weight.format) ? DenseRows::bytes(num_rows, weight.cols)
                                   : Activations::bytes(num_rows, weight.cols);
  }
  static Operand at(uint8_t* memory, const paged_weight& weight, int num_rows) {
    Operand out{};
    out.num_rows = num_rows;
    if (is_hadamard(weight)) {
      out.hadamard = HadamardRows::at(memory, num_rows, weight.cols);
    } else if (is_dense(weight.format)) {
      out.dense = {memory, num_rows, dense_vectors(weight.format, weight.cols)};
    } else {
      out.groups = {reinterpret_cast<ActivationGroup*>(memory), num_rows};
    }
    return out;
  }
};

// Each thread's sums of kSumPanels panels.
struct ThreadSums {
  uint8_t* data;
  size_t bytes;  // bytes per thread

  static size_t bytes_of(int num_rows) { return line_aligned(kSumPanels * sums_bytes(num_rows)); }

  float (*of(int thread) const)[kPanelRows] {
    return reinterpret_cast<float (*)[kPanelRows]>(data + thread * bytes);
  }
};

// Up to this many rows, a product is bound by memory and takes as long as with one row.
constexpr int kMemoryBoundRows = 8;

// Cost of multiplying `panels` panels with num_rows rows.
inline int64_t product_cost(int panels, int cols, int num_rows) {
  return static_cast<int64_t>(panels) * kPanelRows * cols * (num_rows < kMemoryBoundRows ? kMemoryBoundRows : num_rows);
}

// Rows that are converted together.
inline int prepared_together(const paged_weight& weight) { return is_hadamard(weight) ? kTokenTile : 1; }

// Converts tiles [first, last) of the rows of x, whose columns are in the weight's order.
inline void prepare_tiles(const paged_weight& weight, const Matrix& x, const float* norm_weight, float eps,
                          const Operand& out, int64_t first, int64_t last) {
  if (is_hadamard(weight)) {
    hadamard_tiles(x, norm_weight, eps, out.hadamard, first, last);
  } else if (is_dense(weight.format)) {
    prepare_dense_rows(weight, x, norm_weight, eps, out.dense, first, last);
  } else {
    for (int64_t row = first; row < last; ++row)
      quantize_row(x, row, weight.cols, norm_weight, eps, out.groups, row);
  }
}

// Converts rows of x, times 1 / rms and norm_weight if given, to the form that the weight multiplies, with columns in
// its order.
inline auto prepare_rows(Job& job, const paged_weight& weight, Matrix x, const float* norm_weight, float eps,
                         const Operand& out) {
  x.order = weight.order;
  const int unit = prepared_together(weight);
  return job.phase((out.num_rows + unit - 1) / unit, unit * row_cost(weight.cols),
                   [&weight, x, norm_weight, eps, out](int64_t first, int64_t last, int) {
                     prepare_tiles(weight, x, norm_weight, eps, out, first, last);
                   });
}

// out[:, concat of the weights' rows] = x . W^T, in units that threads claim.
struct Product {
  const paged_weight* weights;
  Operand x;
  Output out;
  ThreadSums sums;
  bool hadamard, dense;
  int64_t total;  // panels of all weights, or pairs of panels in the Hadamard form
  int unit;       // of these, how many are multiplied together

  Product(const paged_weight* weights, int num_weights, const Operand& x, const Output& out, const ThreadSums& sums)
      : weights(weights),
        x(x),
        out(out),
        sums(sums),
        hadamard(is_hadamard(weights[0])),
        dense(is_dense(weights[0].format)),
        total(0),
        unit(dense ? dense_unit(weights[0], x.num_rows) : 1) {
    for (int i = 0; i < num_weights; ++i) total += hadamard ? hadamard_pairs(weights[i]) : num_panels(weights[i].rows);
  }

  int64_t units() const { return (total + unit - 1) / unit; }
  int64_t cost() const {
    return hadamard ? product_cost(2, weights[0].cols, hadamard_rows_paid(x.num_rows))
                    : product_cost(unit, weights[0].cols, x.num_rows);
  }
  void operator()(int64_t first, int64_t last, int thread) const {
    first *= unit;
    last = last * unit < total ? last * unit : total;
    if (hadamard) {
      multiply_hadamard(weights, x.hadamard, out, first, last, thread);
    } else if (dense) {
      multiply_dense_weights(weights, x.dense, out, sums.of(thread), first, last);
    } else {
      multiply_packed(weights, x.groups, out, sums.of(thread), first, last);
    }
  }
};

inline auto multiply(Job& job, const paged_weight* weights, int num_weights, const Operand& x, const Output& out,
                     const ThreadSums& sums) {
  const Product product(weights, num_weights, x, out, sums);
  return job.phase(product.units(), product.cost(), product);
}

// Whether the activations between gate/up and down are computed directly in down's form. With dense weights they are:
// 512 rows of 1536 float32 numbers would be 3 MB to write and read again.
inline bool takes_hidden_as_it_comes(const paged_weight& gate, const paged_weight& down) {
  return is_dense(gate.format) && is_dense(down.format);
}

// hidden = activation(gate x) * (up x), in float32, or in down's form if `takes`.
inline auto multiply_gated(Job& job, const paged_weight& gate, const paged_weight& up, const paged_weight& down,
                           bool takes, const Operand& x, int32_t activation, float* hidden, const ThreadSums& sums) {
  const int64_t panels = num_panels(gate.rows);
  const int unit = is_dense(gate.format) ? dense_unit(gate, x.num_rows) / 2 : 1;
  return job.phase(
      (panels + unit - 1) / unit,
      product_cost(2 * unit, gate.cols, is_hadamard(gate) ? hadamard_rows_paid(x.num_rows) : x.num_rows),
      [&gate, &up, &down, takes, x, activation, hidden, sums, panels, unit](int64_t first, int64_t last, int thread) {
        first *= unit;
        last = last * unit < panels ? last * unit : panels;
        if (is_hadamard(gate)) {
          multiply_hadamard_gated(gate, up, x.hadamard, activation, hidden, first, last, thread);
        } else if (is_dense(gate.format)) {
          if (takes) {
            const Operand out = Operand::at(reinterpret_cast<uint8_t*>(hidden), down, x.num_rows);
            multiply_dense_gated(gate, up, x.dense, activation, down, out.dense, sums.of(thread), first, last);
          } else {
            multiply_dense_gated(gate, up, x.dense, activation, hidden, sums.of(thread), first, last);
          }
        } else {
          multiply_packed_gated(gate, up, x.groups, activation, hidden, sums.of(thread), first, last);
        }
      });
}

}  // namespace
}  // namespace paged
