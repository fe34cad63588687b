// Dense formats: the numbers that a vector of a panel (layout.h) holds, and activations in the form that they multiply.
//
// Activations are multiplied as float32; with bfloat16 weights they are rounded to bfloat16 first, as in torch.
#pragma once

#include "activations.h"

namespace paged {
namespace {

// Vectors of a panel in a block. With 96, four panels take 24 KiB of a first-level cache, and rows of 576 or 1536
// 16-bit columns are whole blocks. 64 took 2 % longer on SmolLM2-135M's prefill on Zen 5, because tiles begin and end
// more often.
constexpr int kDenseBlock = 96;

// Each format defines the columns of one vector of a panel, the element type of activations, and their product. Where
// an instruction multiplies only one column, a vector of two columns is processed in two parts.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct DenseBfloat16 {
  static constexpr int kCols = 2, kParts = 1;
  using Element = uint16_t;
  using Vector = Pairs;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_pairs(reinterpret_cast<const uint32_t*>(p));
  }
  template <int kPart>
  static Vector same(const Element* x) {
    uint32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return broadcast_pair(pair);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return dot_pairs(w, x, sum); }
  static void store(Element* to, Floats x) { store_pairs(to, x); }
};
#else
struct DenseBfloat16 {
  static constexpr int kCols = 2, kParts = 2;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return kPart == 0 ? load_even_bfloat16(p) : load_odd_bfloat16(p);
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(x[kPart]);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) {
    alignas(64) uint16_t rounded[16];
    store_bfloat16(rounded, x);
    store_floats(to, load_bfloat16(rounded));
  }
};
#endif

struct DenseFloat16 {
  static constexpr int kCols = 2, kParts = 2;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_half(p + kPart * kHalves);
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(x[kPart]);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) { store_floats(to, x); }
};

struct DenseFloat32 {
  static constexpr int kCols = 1, kParts = 1;
  using Element = float;
  using Vector = Floats;

  template <int kPart>
  static Vector load(const uint8_t* p) {
    return load_floats(reinterpret_cast<const float*>(p));
  }
  template <int kPart>
  static Vector same(const Element* x) {
    return broadcast(*x);
  }
  static Floats multiply_add(const Vector& w, const Vector& x, Floats sum) { return fma(w, x, sum); }
  static void store(Element* to, Floats x) { store_floats(to, x); }
};

// Calls take(Dense{}) for a dense format.
template <class Take>
inline auto with_dense(int32_t format, const Take& take) {
  switch (format) {
    case PAGED_DENSE_BFLOAT16:
      return take(DenseBfloat16{});
    case PAGED_DENSE_FLOAT16:
      return take(DenseFloat16{});
    default:
      return take(DenseFloat32{});
  }
}

// Activations by blocks of columns: [blocks][rows][columns of the block].
struct DenseRows {
  uint8_t* data;
  int num_rows;
  int vectors;  // vectors of a panel

  static size_t bytes(int num_rows, int cols) {
    return line_aligned(sizeof(float) * num_rows * (static_cast<size_t>(cols) + 1));
  }
  // Returns the number of vectors of the block that begins at `first`.
  int width(int first) const { return vectors - first < kDenseBlock ? vectors - first : kDenseBlock; }

  template <class Dense>
  typename Dense::Element* at(int first, int64_t row) const {
    const int64_t vector = static_cast<int64_t>(first) * num_rows + row * width(first);
    return reinterpret_cast<typename Dense::Element*>(data) + vector * Dense::kCols;
  }
  // Writes 16 columns of a row from `col` on, a multiple of 16, or as many as the row still has.
  template <class Dense>
  void store(int64_t row, int64_t col, Floats columns) const {
    const int vector = static_cast<int>(col / Dense::kCols), first = vector / kDenseBlock * kDenseBlock;
    typename Dense::Element* to = at<Dense>(first, row) + (vector - first) * Dense::kCols;
    const int left = (vectors - vector) * Dense::kCols;
    if (left >= 16) {
      Dense::store(to, columns);
    } else {
      typename Dense::Element last[16];
      Dense::store(last, columns);
      __builtin_memcpy(to, last, sizeof(last[0]) * left);
    }
  }
};
static_assert(kDenseBlock % 16 == 0, "16 columns lie in one block");

// Writes row `row` of x, times 1 / rms and norm_weight if given, to row `place` of out.
template <class Dense>
inline void prepare_dense_row(const Matrix& x, int64_t row, int cols, const float* norm_weight, float eps,
                              const DenseRows& out, int64_t place) {
  using Element = typename Dense::Element;
  const Floats factor = broadcast(norm_weight != nullptr ? inverse_rms(x, row, cols, eps) : 1.0f);
  for (int first = 0; first < out.vectors; first += kDenseBlock) {
    Element* to = out.at<Dense>(first, place);
    const int begin = first * Dense::kCols, count = out.width(first) * Dense::kCols;
    for (int c = 0; c < count; c += 16) {
      const int here = cols - begin - c;
      Floats v = here >= 16 ? x.load(row, begin + c) : x.load_first(row, begin + c, here);
      if (norm_weight != nullptr) {
        const float* weight = norm_weight + begin + c;
        v = mul(mul(v, factor), here >= 16 ? load_floats(weight) : load_first(weight, here));
      }
      if (count - c >= 16) {
        Dense::store(to + c, v);
      } else {
        Element last[16];
        Dense::store(last, v);
        __builtin_memcpy(to + c, last, sizeof(Element) * (count - c));
      }
    }
  }
}

// Writes rows [first, last) of x, times 1 / rms and norm_weight if given, to `out`.
inline void prepare_dense_rows(const paged_weight& weight, const Matrix& x, const float* norm_weight, float eps,
                               const DenseRows& out, int64_t first, int64_t last) {
  with_dense(weight.format, [&](auto of) {
    for (int64_t row = first; row < last; ++row)
      prepare_dense_row<decltype(of)>(x, row, weight.cols, norm_weight, eps, out, row);
  });
}

}  // namespace
}  // namespace paged
