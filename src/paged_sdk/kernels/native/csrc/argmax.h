// Computes a row's argmax.
#pragma once

#include <limits>

#include "simd.h"

namespace paged {
namespace {

// Returns the column of a row's maximum, the first of equal maxima; -1 if a number is NaN or the maximum is not finite.
// The row is read once: blocks are compared by their maximum, and only the best block is searched for the column.
inline int64_t argmax_of(const float* row, int cols) {
  constexpr int kBlock = 512;
  constexpr int32_t kInfinity = 0x7f800000;
  float largest = -std::numeric_limits<float>::infinity();
  int64_t place = -1;
  Ints magnitudes = zero_ints();
  for (int first = 0; first < cols; first += kBlock) {
    const int end = cols - first < kBlock ? cols : first + kBlock;
    float of_block = -std::numeric_limits<float>::infinity();
    int col = first;
    if (first + 16 <= end) {
      Floats most = load_floats(row + first);
      for (; col + 16 <= end; col += 16) {
        const Floats numbers = load_floats(row + col);
        most = maximum(most, numbers);
        magnitudes = max_magnitude(magnitudes, numbers);
      }
      of_block = max_of(most);
    }
    for (; col < end; ++col) {
      if (row[col] != row[col]) return -1;
      of_block = row[col] > of_block ? row[col] : of_block;
    }
    if (of_block > largest) largest = of_block, place = first;
  }
  if (max_of(magnitudes) > kInfinity || largest == std::numeric_limits<float>::infinity()) return -1;
  if (place >= 0)
    while (row[place] != largest) ++place;
  return place;
}

}  // namespace
}  // namespace paged
