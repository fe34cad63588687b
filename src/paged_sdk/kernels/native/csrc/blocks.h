// Unpacks and packs GGUF blocks in plain loops, which run only at load.
#pragma once

#include <cstring>

#include "abi.h"
#include "layout.h"

namespace paged {
namespace {

// One row's block, unpacked. Scales keep the file's bits.
struct Block {
  uint8_t q[256];      // unsigned weights
  uint16_t unit;       // float16
  uint16_t minimum;    // float16
  uint8_t scales[16];  // 4-bit, 6-bit (Q4_K and Q5_K use 8 entries; Q3_K's are stored plus 32) or int8
  uint8_t minima[16];  // 4-bit or 6-bit (8 entries used)
};

inline uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
inline uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

inline void split_nibbles(const uint8_t* p, int count, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < count; ++i) low[i] = p[i] & 15;
  for (int i = 0; i < count; ++i) high[i] = p[i] >> 4;
}

inline void join_nibbles(const uint8_t* low, const uint8_t* high, int count, uint8_t* p) {
  for (int i = 0; i < count; ++i) p[i] = static_cast<uint8_t>((low[i] & 15) | high[i] << 4);
}

inline void add_fifth_bits(uint32_t bits, uint8_t* q) {
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>(q[i] | (bits >> i & 1) << 4);
}

inline uint32_t fifth_bits(const uint8_t* q) {
  uint32_t bits = 0;
  for (int i = 0; i < kGroup; ++i) bits |= static_cast<uint32_t>(q[i] >> 4 & 1) << i;
  return bits;
}

inline void split_pairs(const uint8_t* p, uint8_t* q) {
  for (int g = 0; g < 4; ++g)
    for (int i = 0; i < 32; ++i) q[32 * g + i] = p[i] >> 2 * g & 3;
}

inline void join_pairs(const uint8_t* q, uint8_t* p) {
  for (int i = 0; i < 32; ++i)
    p[i] = static_cast<uint8_t>((q[i] & 3) | (q[32 + i] & 3) << 2 | (q[64 + i] & 3) << 4 | (q[96 + i] & 3) << 6);
}

// The twelve scale bytes of Q4_K and Q5_K hold four scales and four minima in the low six bits, the low nibbles of the
// other eight numbers, and the top two bits of these in the top bits of the first eight bytes.
inline void split_six_bits(const uint8_t* p, Block& out) {
  for (int j = 0; j < 4; ++j) {
    out.scales[j] = p[j] & 63;
    out.minima[j] = p[j + 4] & 63;
    out.scales[j + 4] = static_cast<uint8_t>((p[j + 8] & 15) | (p[j] >> 6) << 4);
    out.minima[j + 4] = static_cast<uint8_t>(p[j + 8] >> 4 | (p[j + 4] >> 6) << 4);
  }
}

inline void join_six_bits(const Block& in, uint8_t* p) {
  for (int j = 0; j < 4; ++j) {
    p[j] = static_cast<uint8_t>(in.scales[j] | (in.scales[j + 4] >> 4) << 6);
    p[j + 4] = static_cast<uint8_t>(in.minima[j] | (in.minima[j + 4] >> 4) << 6);
    p[j + 8] = static_cast<uint8_t>((in.scales[j + 4] & 15) | (in.minima[j + 4] & 15) << 4);
  }
}

inline void read_q4_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  split_nibbles(p + 2, 16, out.q, out.q + 16);
}
inline void read_q4_1(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_nibbles(p + 4, 16, out.q, out.q + 16);
}
inline void read_q5_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  split_nibbles(p + 6, 16, out.q, out.q + 16);
  add_fifth_bits(load32(p + 2), out.q);
}
inline void read_q5_1(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_nibbles(p + 8, 16, out.q, out.q + 16);
  add_fifth_bits(load32(p + 4), out.q);
}
inline void read_q8_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  for (int i = 0; i < kGroup; ++i) out.q[i] = p[2 + i] ^ 0x80;
}
inline void read_q2_k(const uint8_t* p, Block& out) {
  split_nibbles(p, 16, out.scales, out.minima);
  for (int half = 0; half < 2; ++half) split_pairs(p + 16 + 32 * half, out.q + 128 * half);
  out.unit = load16(p + 80);
  out.minimum = load16(p + 82);
}
inline void read_q3_k(const uint8_t* p, Block& out) {
  for (int half = 0; half < 2; ++half) split_pairs(p + 32 + 32 * half, out.q + 128 * half);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i)
      out.q[32 * g + i] = static_cast<uint8_t>(out.q[32 * g + i] | (p[i] >> g & 1) << 2);
  split_nibbles(p + 96, 8, out.scales, out.scales + 8);
  for (int j = 0; j < 16; ++j)
    out.scales[j] = static_cast<uint8_t>(out.scales[j] | (p[104 + j % 4] >> 2 * (j / 4) & 3) << 4);
  out.unit = load16(p + 108);
}
inline void read_q4_k(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_six_bits(p + 4, out);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 16 + 32 * c, 32, out.q + 64 * c, out.q + 64 * c + 32);
}
inline void read_q5_k(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_six_bits(p + 4, out);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 48 + 32 * c, 32, out.q + 64 * c, out.q + 64 * c + 32);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i)
      out.q[32 * g + i] = static_cast<uint8_t>(out.q[32 * g + i] | (p[16 + i] >> g & 1) << 4);
}
inline void read_q6_k(const uint8_t* p, Block& out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* top = p + 128 + 32 * half;
    uint8_t* q = out.q + 128 * half;
    split_nibbles(p + 64 * half, 64, q, q + 64);
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < 32; ++i) q[32 * g + i] = static_cast<uint8_t>(q[32 * g + i] | (top[i] >> 2 * g & 3) << 4);
  }
  std::memcpy(out.scales, p + 192, 16);
  out.unit = load16(p + 208);
}

inline void write_q4_0(const Block& in, uint8_t* p) {
  std::memcpy(p, &in.unit, 2);
  join_nibbles(in.q, in.q + 16, 16, p + 2);
}
inline void write_q4_1(const Block& in, uint8_t* p) {
  std::memcpy(p, &in.unit, 2);
  std::memcpy(p + 2, &in.minimum, 2);
  join_nibbles(in.q, in.q + 16, 16, p + 4);
}
inline void write_q5_0(const Block& in, uint8_t* p) {
  const uint32_t fifth = fifth_bits(in.q);
  std::memcpy(p, &in.unit, 2);
  std::memcpy(p + 2, &fifth, 4);
  join_nibbles(in.q, in.q + 16, 16, p + 6);
}
inline void write_q5_1(const Block& in, uint8_t* p) {
  const uint32_t fifth = fifth_bits(in.q);
  std::memcpy(p, &in.unit, 2);
  std::memcpy(p + 2, &in.minimum, 2);
  std::memcpy(p + 4, &fifth, 4);
  join_nibbles(in.q, in.q + 16, 16, p + 8);
}
inline void write_q8_0(const Block& in, uint8_t* p) {
  std::memcpy(p, &in.unit, 2);
  for (int i = 0; i < kGroup; ++i) p[2 + i] = in.q[i] ^ 0x80;
}
inline void write_q2_k(const Block& in, uint8_t* p) {
  join_nibbles(in.scales, in.minima, 16, p);
  for (int half = 0; half < 2; ++half) join_pairs(in.q + 128 * half, p + 16 + 32 * half);
  std::memcpy(p + 80, &in.unit, 2);
  std::memcpy(p + 82, &in.minimum, 2);
}
inline void write_q3_k(const Block& in, uint8_t* p) {
  std::memset(p, 0, 32);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) p[i] = static_cast<uint8_t>(p[i] | (in.q[32 * g + i] >> 2 & 1) << g);
  for (int half = 0; half < 2; ++half) join_pairs(in.q + 128 * half, p + 32 + 32 * half);
  join_nibbles(in.scales, in.scales + 8, 8, p + 96);
  std::memset(p + 104, 0, 4);
  for (int j = 0; j < 16; ++j)
    p[104 + j % 4] = static_cast<uint8_t>(p[104 + j % 4] | (in.scales[j] >> 4 & 3) << 2 * (j / 4));
  std::memcpy(p + 108, &in.unit, 2);
}
inline void write_k_scales(const Block& in, uint8_t* p) {
  std::memcpy(p, &in.unit, 2);
  std::memcpy(p + 2, &in.minimum, 2);
  join_six_bits(in, p + 4);
}
inline void write_q4_k(const Block& in, uint8_t* p) {
  write_k_scales(in, p);
  for (int c = 0; c < 4; ++c) join_nibbles(in.q + 64 * c, in.q + 64 * c + 32, 32, p + 16 + 32 * c);
}
inline void write_q5_k(const Block& in, uint8_t* p) {
  write_k_scales(in, p);
  for (int c = 0; c < 4; ++c) join_nibbles(in.q + 64 * c, in.q + 64 * c + 32, 32, p + 48 + 32 * c);
  std::memset(p + 16, 0, 32);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) p[16 + i] = static_cast<uint8_t>(p[16 + i] | (in.q[32 * g + i] >> 4 & 1) << g);
}
inline void write_q6_k(const Block& in, uint8_t* p) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* q = in.q + 128 * half;
    uint8_t* top = p + 128 + 32 * half;
    join_nibbles(q, q + 64, 64, p + 64 * half);
    std::memset(top, 0, 32);
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < 32; ++i) top[i] = static_cast<uint8_t>(top[i] | (q[32 * g + i] >> 4 & 3) << 2 * g);
  }
  std::memcpy(p + 192, in.scales, 16);
  std::memcpy(p + 208, &in.unit, 2);
}

// A GGUF block format: its packed layout, its bytes per block in a file, and its largest unsigned weight.
struct BlockForm {
  const Layout* layout;
  int block_bytes;
  int levels;
  void (*read)(const uint8_t* block, Block& out);
  void (*write)(const Block& in, uint8_t* block);
};

// Returns null if the format is unknown.
inline const BlockForm* block_form(int32_t format) {
  static constexpr BlockForm kForms[] = {
      {&kQ4_0, 18, 15, read_q4_0, write_q4_0},  {&kQ4_1, 20, 15, read_q4_1, write_q4_1},
      {&kQ5_0, 22, 31, read_q5_0, write_q5_0},  {&kQ5_1, 24, 31, read_q5_1, write_q5_1},
      {&kQ8_0, 34, 255, read_q8_0, write_q8_0}, {&kQ2_K, 84, 3, read_q2_k, write_q2_k},
      {&kQ3_K, 110, 7, read_q3_k, write_q3_k},  {&kQ4_K, 144, 15, read_q4_k, write_q4_k},
      {&kQ5_K, 176, 31, read_q5_k, write_q5_k}, {&kQ6_K, 210, 63, read_q6_k, write_q6_k},
  };
  static constexpr int32_t kFormats[] = {PAGED_Q4_0, PAGED_Q4_1, PAGED_Q5_0, PAGED_Q5_1, PAGED_Q8_0,
                                         PAGED_Q2_K, PAGED_Q3_K, PAGED_Q4_K, PAGED_Q5_K, PAGED_Q6_K};
  for (int i = 0; i < 10; ++i)
    if (kFormats[i] == format) return &kForms[i];
  return nullptr;
}

}  // namespace
}  // namespace paged
