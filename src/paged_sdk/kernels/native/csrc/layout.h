// Defines the memory layout of packed weights, for the code that packs them (pack.cpp) and for the kernels.
//
// A matrix [N, K] is cut into panels of 16 rows, and a panel into blocks along K. A block holds 16 rows and 32 (legacy
// formats) or 256 (K formats) columns: first the scales, then per group of 32 columns the weights as unsigned integers
// in bit planes. A vector of a plane is 16 rows x 4 consecutive columns (a "quad"), so that one dot-product instruction
// adds four products to each of 16 rows and no sum ever crosses lanes:
//
//   nibbles   4 vectors: vector v has quad v in the low and quad v + 4 in the high halves of its bytes
//   fifth     1 vector: bit q of a byte belongs to quad q
//   top pair  2 vectors: vector v has in bits 2 i, 2 i + 1 of a byte the top bits of quad 4 v + i
//   pairs     2 vectors: vector v has quad 4 v + i in bits 2 i, 2 i + 1 of its bytes
//   third     1 vector, after pairs: bit q of a byte belongs to quad q
//   bytes     8 vectors, one per quad
//
// A panel of a dense matrix (dense_rows.h) has neither blocks nor scales. A vector is 16 rows x 2 columns in
// bfloat16 (a row's two numbers adjacent) or in float16 (one column after the other), or 16 rows x 1 column in float32.
//
// A panel of a grouped matrix begins with 16 float32 units of its scales, followed by 16 units of its minima, or by 64
// bytes that hold the levels of its codes, stored plus 128. Its blocks are the groups of columns, of which the last may
// be shorter: 16 float16 scales in these units, and 16 minima. If a row's unit of minima is 0, the minima are multiples
// of its scales, which keeps integral zero points exact.
//
// The six-bit scales and minima of K formats stay six bits: 256 numbers (per group 16 scales, 16 minima) in 192 bytes,
// with the last 64 numbers spread over the top two bits of these bytes. Q3_K's, stored plus 32, are packed likewise: 16
// groups of 16 scales. So every format keeps the file's own bits per weight, which determine the speed of a single
// sequence's decode, as it is bound by memory bandwidth.
#pragma once

#include <cstdint>

#include "abi.h"

namespace paged {

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;  // columns of a group of weights, with two activation scales
constexpr int kVector = 64;
constexpr int kHalves = 2 * kPanelRows;  // bytes of one float16 per row
constexpr int kSixBits = 192;            // bytes of a block's six-bit scales and minima

// Columns whose int8 codes share a scale in products with many rows (hadamard_panel.h); a row's last block may be
// shorter. Simulated in float32, mean KL of SmolLM2's prompts is 0.0021 with 128, 0.0025 with 256 and 0.0028 with whole
// rows. Compared with whole rows, products take 9 % longer with 128 and 4 % with 256 on AMD Zen 4.
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
  int groups;        // groups of 32 columns in a block; 0: given by the format number
  int header;        // bytes before the first group
  int group_bytes;   // bytes of a group's weights
  int offset_shift;  // weights are stored plus 2^offset_shift; -1: they have minima instead
  int panel_header = 0;     // bytes before a panel's first block
  bool has_levels = false;  // weights are indices into a table of bytes

  constexpr int block_cols() const { return groups * kGroup; }
  constexpr int block_bytes() const { return header + groups * group_bytes; }
  // Returns the number of groups of 32 columns in a block of this format.
  constexpr int block_groups(int32_t format) const { return groups > 0 ? groups : format >> 16; }
  constexpr int64_t panel_bytes(int32_t format, int cols) const {
    const int in_row = cols / kGroup, in_block = block_groups(format);
    const int64_t blocks = (in_row + in_block - 1) / in_block;
    return panel_header + blocks * header + static_cast<int64_t>(in_row) * group_bytes;
  }
  // The planes of the weights as they are multiplied.
  constexpr Planes numbers() const { return has_levels ? Planes::kBytes : planes; }
  // Bits of the weights as they are multiplied.
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
