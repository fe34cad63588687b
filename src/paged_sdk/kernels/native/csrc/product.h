// Multiplies with weights of every form, so that callers need not ask which: packed (linear.h), Hadamard
// (hadamard_product.h) or dense (dense_product.h).
#pragma once

#include "dense_product.h"
#include "hadamard_product.h"

namespace paged {
namespace {

inline bool is_hadamard(const paged_weight& weight) { return weight.format == PAGED_HADAMARD_INT8; }

// Activations in the form that a weight, and every other weight of the same input, multiplies.
struct Operand {
  Activations groups;    // for packed weights
  HadamardRows rotated;  // for those in the Hadamard form
  DenseRows dense;       // for dense ones

  static size_t bytes(const paged_weight& weight, int num_rows, int team_size) {
    if (is_hadamard(weight)) return HadamardRows::bytes(num_rows, weight.cols, team_size);
    return is_dense(weight.format) ? dense_bytes(num_rows, weight.cols, team_size)
                            : activation_bytes(num_rows, weight.cols, team_size);
  }
};

// Brings rows of x, times 1 / rms and norm_weight where that is given, into the form that the weight multiplies. When
// it returns, all that the calling thread multiplies is ready.
inline Operand prepare_rows(const paged_weight& weight, const Matrix& x, int num_rows, const float* norm_weight,
                            float eps, uint8_t* scratch, const Team& team) {
  Operand out{};
  if (is_hadamard(weight)) {
    out.rotated = hadamard_rows(x, num_rows, weight.cols, norm_weight, eps, scratch, team);
  } else if (is_dense(weight.format)) {
    out.dense = prepare_dense_rows(weight, x, num_rows, norm_weight, eps, scratch, team);
  } else {
    out.groups = quantize_rows(x, num_rows, weight.cols, norm_weight, eps, scratch, team);
  }
  return out;
}

// out[:, concat of the weights' rows] = x . W^T: the thread's share. `sums` is its memory for kSumPanels panels'
// (linear.h).
inline void multiply(const paged_weight* weights, int num_weights, const Operand& x, const Output& out,
                     float (*sums)[kPanelRows], const Team& team) {
  if (is_hadamard(weights[0])) {
    multiply_hadamard(weights, num_weights, x.rotated, out, team);
  } else if (is_dense(weights[0].format)) {
    multiply_dense_weights(weights, num_weights, x.dense, out, sums, team);
  } else {
    multiply_packed(weights, num_weights, x.groups, out, sums, team);
  }
}

// hidden = activation(gate x) * (up x): the thread's share of columns. `sums` as of multiply.
inline void multiply_gated(const paged_weight& gate, const paged_weight& up, const Operand& x, int32_t activation,
                           float* hidden, float (*sums)[kPanelRows], const Team& team) {
  if (is_hadamard(gate)) {
    multiply_hadamard_gated(gate, up, x.rotated, activation, hidden, team);
  } else if (is_dense(gate.format)) {
    multiply_dense_gated(gate, up, x.dense, activation, hidden, sums, team);
  } else {
    multiply_packed_gated(gate, up, x.groups, activation, hidden, sums, team);
  }
}

// The same, in the form that the weight `down` multiplies, once all threads are done. Dense weights take it as it is
// multiplied: 512 rows of 1536 float32 numbers, written and read again, were 3 MB.
inline Operand multiply_gated_for(const paged_weight& down, const paged_weight& gate, const paged_weight& up,
                                  const Operand& x, int num_rows, int32_t activation, float* hidden, uint8_t* scratch,
                                  float (*sums)[kPanelRows], const Team& team) {
  if (is_dense(gate.format) && is_dense(down.format)) {
    Operand out{};
    out.dense = {reinterpret_cast<uint8_t*>(hidden), num_rows, dense_vectors(down.format, down.cols)};
    multiply_dense_gated(gate, up, x.dense, activation, down, out.dense, sums, team);
    team.barrier();
    return out;
  }
  multiply_gated(gate, up, x, activation, hidden, sums, team);
  team.barrier();
  return prepare_rows(down, {hidden, gate.rows, PAGED_FLOAT32}, num_rows, nullptr, 0.0f, scratch, team);
}

}  // namespace
}  // namespace paged
