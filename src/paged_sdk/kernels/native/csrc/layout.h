// Says how packed weights lie in memory, for the code that packs them (pack.cpp) and the kernels.
//
// A matrix [N, K] is cut into panels of 16 rows; a panel is a run of blocks along K. A block holds, for its 16 rows and
// 32 (legacy formats) or 256 (K formats) columns, first the scales and then, per group of 32 columns, the weights as
// unsigned integers in bit planes. A vector of a plane is 16 rows x 4 consecutive columns (a "quad"), so that one
// dot-product instruction adds four products to each of 16 rows and no sum ever crosses lanes:
//
//   nibbles   4 vectors: vector v has quad v in the low and quad v + 4 in the high halves of its bytes
//   fifth     1 vector: bit q of a byte belongs to quad q
//   top pair  2 vectors: vector v has in bits 2 i, 2 i + 1 of a byte the top bits of quad 4 v + i
//   pairs     2 vectors: vector v has quad 4 v + i in bits 2 i, 2 i + 1 of its bytes
//   third     1 vector, after pairs: bit q of a byte belongs to quad q
//   bytes     8 vectors, one per quad
//
// A panel of a dense matrix (dense_product.h) has no blocks either, and no scales: a vector is 16 rows x 2 columns in
// bfloat16 (a row's two numbers side by side) or in float16 (a column after the other), 16 rows x 1 column in float32.
//
// A panel of a grouped matrix begins with 16 float32 units of its scales, and then 16 of its minima, or the levels of
// its codes as bytes, plus 128, in 64 bytes. Of it, a block is a group of columns, of which the last may have fewer: 16
// float16 scales in these units, and as many minima. Where a row's unit of minima is 0 they are multiples of its
// scales, so that whole zero points stay what they are.
//
// The K formats' six-bit scales and minima stay six bits: 256 numbers (group g: 16 scales, 16 minima) in 192 bytes, the
// last 64 numbers spread over the top pairs of the first 192. Those of Q3_K, plus 32, are packed likewise: 16 groups of
// 16 scales. So every format keeps the file's own bits per weight, which is what a single stream, bound by memory
// bandwidth, pays for.
#pragma once

#include <cstdint>

#include "abi.h"

namespace paged {

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;  // columns that share an activation scale
constexpr int kVector = 64;
constexpr int kHalves = 2 * kPanelRows;  // bytes of one float16 per row
constexpr int kSixBits = 192;            // bytes of a block's six-bit scales and minima

// Columns whose int8 codes share a scale in products with many rows (hadamard_panel.h); a row's last block may have
// fewer. Simulated in float32, mean KL of SmolLM2's prompts is 0.0021 with 128, 0.0025 with 256 and 0.0028 with whole
// rows; products take 9 and 4 % longer than with whole rows on AMD Zen 4.
constexpr int kScaleGroups = 8;
constexpr int kScaleCols = kScaleGroups * kGroup;
constexpr int scale_blocks(int cols) { return (cols + kScaleCols - 1) / kScaleCols; }

constexpr int64_t num_panels(int rows) { return (static_cast<int64_t>(rows) + kPanelRows - 1) / kPanelRows; }

constexpr bool is_dense(int32_t format) {
  return format == PAGED_DENSE_FLOAT32 || format == PAGED_DENSE_BFLOAT16 || format == PAGED_DENSE_FLOAT16;
}
constexpr int dense_vectors(int32_t format, int cols) { return format == PAGED_DENSE_FLOAT32 ? cols : (cols + 1) / 2; }
constexpr int64_t dense_panel_bytes(int32_t format, int cols) {
  return static_cast<int64_t>(dense_vectors(format, cols)) * kVector;
}

enum class Planes { kPairs, kThree, kNibbles, kFive, kSix, kBytes };

struct Layout {
  Planes planes;
  int groups;        // of 32 columns in a block; 0: the format's number says it
  int header;        // bytes before the first group
  int group_bytes;   // weights of a group
  int offset_shift;  // weights are stored plus 2^offset_shift; -1: they have minima instead
  int panel_header = 0;     // bytes before a panel's first block
  bool has_levels = false;  // whether weights stand for bytes

  constexpr int block_cols() const { return groups * kGroup; }
  constexpr int block_bytes() const { return header + groups * group_bytes; }
  // How many groups of 32 columns a block has, in a format of this number.
  constexpr int block_groups(int32_t format) const { return groups > 0 ? groups : format >> 16; }
  constexpr int64_t panel_bytes(int32_t format, int cols) const {
    const int in_row = cols / kGroup, in_block = block_groups(format);
    const int64_t blocks = (in_row + in_block - 1) / in_block;
    return panel_header + blocks * header + static_cast<int64_t>(in_row) * group_bytes;
  }
  // What weights are when they are multiplied.
  constexpr Planes numbers() const { return has_levels ? Planes::kBytes : planes; }
  // They are below two to the power of this.
  constexpr int bits() const {
    switch (numbers()) {
      case Planes::kPairs:
        return 2;
      case Planes::kThree:
        return 3;
      case Planes::kNibbles:
        return 4;
      case Planes::kFive:
        return 5;
      case Planes::kSix:
        return 6;
      default:
        return 8;
    }
  }
};

constexpr Layout kQ4_0{Planes::kNibbles, 1, kHalves, 4 * kVector, 3};
constexpr Layout kQ4_1{Planes::kNibbles, 1, 2 * kHalves, 4 * kVector, -1};
constexpr Layout kQ5_0{Planes::kFive, 1, kHalves, 5 * kVector, 4};
constexpr Layout kQ5_1{Planes::kFive, 1, 2 * kHalves, 5 * kVector, -1};
constexpr Layout kQ8_0{Planes::kBytes, 1, kHalves, 8 * kVector, 7};
constexpr Layout kQ2_K{Planes::kPairs, 8, 2 * kHalves + 16 * kPanelRows, 2 * kVector, -1};
constexpr Layout kQ3_K{Planes::kThree, 8, kHalves + kSixBits, 3 * kVector, 2};
constexpr Layout kQ4_K{Planes::kNibbles, 8, 2 * kHalves + kSixBits, 4 * kVector, -1};
constexpr Layout kQ5_K{Planes::kFive, 8, 2 * kHalves + kSixBits, 5 * kVector, -1};
constexpr Layout kQ6_K{Planes::kSix, 8, kHalves + 16 * kPanelRows, 6 * kVector, 5};

constexpr int kUnits = 2 * kVector;  // bytes of a grouped panel before its first block
constexpr Layout kGrouped2{Planes::kPairs, 0, 2 * kHalves, 2 * kVector, -1, kUnits};
constexpr Layout kGrouped3{Planes::kThree, 0, 2 * kHalves, 3 * kVector, -1, kUnits};
constexpr Layout kGrouped4{Planes::kNibbles, 0, 2 * kHalves, 4 * kVector, -1, kUnits};
constexpr Layout kGrouped5{Planes::kFive, 0, 2 * kHalves, 5 * kVector, -1, kUnits};
constexpr Layout kGrouped6{Planes::kSix, 0, 2 * kHalves, 6 * kVector, -1, kUnits};
constexpr Layout kGrouped8{Planes::kBytes, 0, 2 * kHalves, 8 * kVector, 7, kUnits};
constexpr Layout kLevels{Planes::kNibbles, 0, kHalves, 4 * kVector, 7, kUnits, true};
constexpr Layout kLevelsOf16{Planes::kNibbles, 1, 2 * kHalves, 4 * kVector, 7, kUnits, true};

constexpr bool is_grouped(int32_t format) { return (format & PAGED_GROUPED) != 0; }
constexpr int grouped_kind(int32_t format) { return format & 15; }
constexpr const Layout& grouped_layout(int32_t format) {
  switch (grouped_kind(format)) {
    case PAGED_GROUPED_2:
      return kGrouped2;
    case PAGED_GROUPED_3:
      return kGrouped3;
    case PAGED_GROUPED_4:
      return kGrouped4;
    case PAGED_GROUPED_5:
      return kGrouped5;
    case PAGED_GROUPED_6:
      return kGrouped6;
    case PAGED_GROUPED_8:
      return kGrouped8;
    case PAGED_GROUPED_LEVELS:
      return kLevels;
    default:
      return kLevelsOf16;
  }
}

}  // namespace paged
