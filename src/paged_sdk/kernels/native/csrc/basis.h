// The change of basis of kernels/kv_basis.py, bit for bit: an orthonormal Hadamard transform of each head, after its
// keys are multiplied by factors and its queries divided by them. Rounding keys and values to few bits costs less then.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace paged {
namespace {

constexpr int kLargestBasisBlock = 256;

// Multiplies blocks of a head by Sylvester's Hadamard matrix, in place. The matrix is its own inverse. A block has as
// many elements as the largest power of two that divides the head's, at most kLargestBasisBlock.
inline void transform_head(float* head, int size) {
  const int block = std::min(size & -size, kLargestBasisBlock);
  for (int c = 0; c < size; c += 16)
    store_floats(head + c, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load_floats(head + c))))));
  for (int distance = 16; distance < block; distance *= 2) {
    for (int first = 0; first < size; first += 2 * distance) {
      for (int c = first; c < first + distance; c += 16) {
        const Floats a = load_floats(head + c), b = load_floats(head + c + distance);
        store_floats(head + c, add(a, b));
        store_floats(head + c + distance, sub(a, b));
      }
    }
  }
  const Floats unit = broadcast(static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))));
  for (int c = 0; c < size; c += 16) store_floats(head + c, mul(load_floats(head + c), unit));
}

// Changes the basis of a token's queries, keys and values, in place: `group` query heads per KV head. Without keys,
// those of the queries alone.
inline void change_basis(const float* factors, int num_kv_heads, int group, int size, float* queries, float* keys,
                         float* values) {
  for (int h = 0; h < num_kv_heads; ++h) {
    const float* own = factors + h * size;
    for (float* query = queries + h * group * size; query < queries + (h + 1) * group * size; query += size) {
      for (int c = 0; c < size; c += 16) store_floats(query + c, div(load_floats(query + c), load_floats(own + c)));
      transform_head(query, size);
    }
    if (keys == nullptr) continue;
    float* key = keys + h * size;
    for (int c = 0; c < size; c += 16) store_floats(key + c, mul(load_floats(key + c), load_floats(own + c)));
    transform_head(key, size);
    transform_head(values + h * size, size);
  }
}

}  // namespace
}  // namespace paged
