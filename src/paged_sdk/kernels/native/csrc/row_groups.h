// Reads a row of logits in groups, whose largest logits are kept, so that a group is read again only if some of its
// tokens matter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace paged {
namespace {

// Orders tokens by falling logits, and equal ones by their ids.
struct IsLikelier {
  template <class Candidate>
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  }
};

class RowGroups {
 public:
  static constexpr int kSize = 128;

  static int count_of(int vocab_size) { return (vocab_size + kSize - 1) / kSize; }

  // `maxima` holds the largest logit of each group, once find_maxima() has been called.
  RowGroups(const float* row, int vocab_size, float* maxima)
      : row_(row), vocab_size_(vocab_size), count_(count_of(vocab_size)), maxima_(maxima) {}

  int count() const { return count_; }
  float largest_of(int group) const { return maxima_[group]; }
  int end_of(int group) const { return std::min((group + 1) * kSize, vocab_size_); }

  // Loads 16 logits; beyond the row's end they are -inf.
  Floats load(int first) const {
    if (first + 16 <= vocab_size_) return load_floats(row_ + first);
    alignas(64) float values[16];
    for (int i = 0; i < 16; ++i)
      values[i] = first + i < vocab_size_ ? row_[first + i] : -std::numeric_limits<float>::infinity();
    return load_floats(values);
  }

  // Returns the largest logit, or +inf if the row has NaN.
  float find_maxima() {
    Ints magnitudes = zero_ints();
    float largest = -std::numeric_limits<float>::infinity();
    for (int g = 0; g < count_; ++g) {
      Floats most = broadcast(-std::numeric_limits<float>::infinity());
      for (int col = g * kSize; col < end_of(g); col += 16) {
        const Floats logits = load(col);
        most = maximum(most, logits);
        magnitudes = max_magnitude(magnitudes, logits);
      }
      maxima_[g] = max_of(most);
      largest = std::max(largest, maxima_[g]);
    }
    constexpr int32_t kInfinity = 0x7f800000;
    return max_of(magnitudes) > kInfinity ? std::numeric_limits<float>::infinity() : largest;
  }

  // Returns a logit that at least `count` tokens reach, where the maxima tell one, otherwise -inf: as many groups have
  // a largest logit of at least the count-th largest of these. `sorted` is for a copy of the maxima.
  float reached_by(int64_t count, float* sorted) const {
    if (count > count_) return -std::numeric_limits<float>::infinity();
    std::copy_n(maxima_, count_, sorted);
    std::nth_element(sorted, sorted + count - 1, sorted + count_, [](float a, float b) { return a > b; });
    return sorted[count - 1];
  }

  // Calls visit(first, logits) for each 16 logits, those of tokens `first` and on, of which one is at least `least`.
  template <class Visit>
  void visit(float least, const Visit& visit) const {
    for (int g = 0; g < count_; ++g) {
      if (maxima_[g] < least) continue;
      for (int col = g * kSize; col < end_of(g); col += 16) {
        const Floats logits = load(col);
        if (max_of(logits) >= least) visit(col, logits);
      }
    }
  }

 private:
  const float* row_;
  int vocab_size_, count_;
  float* maxima_;
};

}  // namespace
}  // namespace paged
