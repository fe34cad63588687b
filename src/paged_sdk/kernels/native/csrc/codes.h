// Unpacks a checkpoint's codes of a few bits to bytes in plain loops, which run only at load.
#pragma once

#include <cstring>

#include "abi.h"
#include "layout.h"

namespace paged {
namespace {

// Unpacks 32 consecutive codes from the lowest bit of `p` on. Eight codes take as many bytes as a code has bits.
template <int kBits>
inline void split_stream(const uint8_t* p, uint8_t* q) {
  if constexpr (kBits == 8) {
    std::memcpy(q, p, kGroup);
  } else if constexpr (kBits == 4) {
    for (int i = 0; i < kGroup / 2; ++i) q[2 * i] = p[i] & 15, q[2 * i + 1] = p[i] >> 4;
  } else {
    for (int i = 0; i < kGroup; i += 8, p += kBits) {
      uint64_t eight = 0;
      std::memcpy(&eight, p, kBits);
      for (int j = 0; j < 8; ++j) q[i + j] = static_cast<uint8_t>(eight >> kBits * j & ((1 << kBits) - 1));
    }
  }
}

inline void split_stream(const uint8_t* p, int bits, uint8_t* q) {
  switch (bits) {
    case 1:
      return split_stream<1>(p, q);
    case 2:
      return split_stream<2>(p, q);
    case 3:
      return split_stream<3>(p, q);
    case 4:
      return split_stream<4>(p, q);
    case 5:
      return split_stream<5>(p, q);
    case 6:
      return split_stream<6>(p, q);
    case 7:
      return split_stream<7>(p, q);
    default:
      return split_stream<8>(p, q);
  }
}

// Unpacks 32 codes of a row from column `col` on, a multiple of 32, to bytes, with all their stored bits.
inline void take_out_codes(const paged_codes& codes, int64_t row, int col, uint8_t* q) {
  if (codes.form == PAGED_CODES_OF_EIGHT_ROWS) {
    static constexpr int kShifts[] = {0, 16, 4, 20, 8, 24, 12, 28};
    const uint8_t* word = codes.data + row / 8 * codes.row_bytes + col * codes.word_bytes;
    const int shift = kShifts[row % 8];
    for (int i = 0; i < kGroup; ++i, word += codes.word_bytes) {
      uint32_t eight;
      std::memcpy(&eight, word, 4);
      q[i] = eight >> shift & 15;
    }
    return;
  }
  // 32 codes take as many 32-bit words as a code has bits.
  const uint8_t* p = codes.data + row * codes.row_bytes + int64_t{col / kGroup} * codes.bits * codes.word_bytes;
  uint8_t words[kGroup];
  if (codes.word_bytes != 4) {
    for (int i = 0; i < codes.bits; ++i, p += codes.word_bytes) std::memcpy(words + 4 * i, p, 4);
    p = words;
  }
  if (codes.form == PAGED_CODES_HIGH_FIRST) {
    for (int i = 0; i < kGroup / 2; ++i) q[2 * i] = p[i] >> 4, q[2 * i + 1] = p[i] & 15;
  } else {
    split_stream(p, codes.bits, q);
  }
}

// The same, with the codes' flip and mask applied.
inline void read_codes(const paged_codes& codes, int64_t row, int col, uint8_t* q) {
  take_out_codes(codes, row, col, q);
  if (codes.mask == 255 && codes.flip == 0) return;
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>((q[i] ^ codes.flip) & codes.mask);
}

}  // namespace
}  // namespace paged
