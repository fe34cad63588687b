// GGUF blocks into panels (layout.h). Runs once, at load: plain loops, a pass over the file's bytes.
#include <omp.h>
#include <sys/mman.h>

#include <cstring>

#include "abi.h"
#include "layout.h"

namespace paged {
namespace {

// One row's block, taken apart. Scales keep the file's bits.
struct Block {
  uint8_t q[256];      // unsigned weights
  uint16_t unit;       // float16
  uint16_t minimum;    // float16
  uint8_t scales[16];  // six-bit (8 used) or int8
  uint8_t minima[8];   // six-bit
};

uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

void split_nibbles(const uint8_t* p, int count, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < count; ++i) low[i] = p[i] & 15;
  for (int i = 0; i < count; ++i) high[i] = p[i] >> 4;
}

void add_fifth_bits(uint32_t bits, uint8_t* q) {
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>(q[i] | (bits >> i & 1) << 4);
}

// The twelve bytes of Q4_K and Q5_K: four scales, four minima in the low six bits, the other eight numbers' low
// nibbles, their top pairs in the top of the first eight bytes.
void split_six_bits(const uint8_t* p, Block& out) {
  for (int j = 0; j < 4; ++j) {
    out.scales[j] = p[j] & 63;
    out.minima[j] = p[j + 4] & 63;
    out.scales[j + 4] = static_cast<uint8_t>((p[j + 8] & 15) | (p[j] >> 6) << 4);
    out.minima[j + 4] = static_cast<uint8_t>(p[j + 8] >> 4 | (p[j + 4] >> 6) << 4);
  }
}

void read_q4_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  split_nibbles(p + 2, 16, out.q, out.q + 16);
}
void read_q4_1(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_nibbles(p + 4, 16, out.q, out.q + 16);
}
void read_q5_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  split_nibbles(p + 6, 16, out.q, out.q + 16);
  add_fifth_bits(load32(p + 2), out.q);
}
void read_q5_1(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_nibbles(p + 8, 16, out.q, out.q + 16);
  add_fifth_bits(load32(p + 4), out.q);
}
void read_q8_0(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  for (int i = 0; i < kGroup; ++i) out.q[i] = p[2 + i] ^ 0x80;
}
void read_q4_k(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_six_bits(p + 4, out);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 16 + 32 * c, 32, out.q + 64 * c, out.q + 64 * c + 32);
}
void read_q5_k(const uint8_t* p, Block& out) {
  out.unit = load16(p);
  out.minimum = load16(p + 2);
  split_six_bits(p + 4, out);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 48 + 32 * c, 32, out.q + 64 * c, out.q + 64 * c + 32);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i)
      out.q[32 * g + i] = static_cast<uint8_t>(out.q[32 * g + i] | (p[16 + i] >> g & 1) << 4);
}
void read_q6_k(const uint8_t* p, Block& out) {
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

// A group of 16 rows into its planes. Four bytes of a row, a quad, are one word of a vector.
void write_group(const Layout& layout, const Block* rows, int group, uint8_t* out) {
  for (int r = 0; r < kPanelRows; ++r) {
    uint32_t quad[8];
    std::memcpy(quad, rows[r].q + group * kGroup, sizeof quad);
    const auto put = [out, r](int vector, uint32_t word) { std::memcpy(out + vector * kVector + 4 * r, &word, 4); };
    if (layout.planes == Planes::kBytes) {
      for (int v = 0; v < 8; ++v) put(v, quad[v]);
      continue;
    }
    for (int v = 0; v < 4; ++v) put(v, (quad[v] & 0x0f0f0f0f) | (quad[v + 4] & 0x0f0f0f0f) << 4);
    if (layout.planes == Planes::kFive) {
      uint32_t fifth = 0;
      for (int q = 0; q < 8; ++q) fifth |= (quad[q] >> 4 & 0x01010101) << q;
      put(4, fifth);
    }
    if (layout.planes == Planes::kSix) {
      for (int v = 0; v < 2; ++v) {
        uint32_t top = 0;
        for (int i = 0; i < 4; ++i) top |= (quad[4 * v + i] >> 4 & 0x03030303) << 2 * i;
        put(4 + v, top);
      }
    }
  }
}

void write_six_bits(const Block* rows, uint8_t* out) {
  uint8_t numbers[256];
  for (int g = 0; g < 8; ++g) {
    for (int r = 0; r < kPanelRows; ++r) {
      numbers[g * 32 + r] = rows[r].scales[g];
      numbers[g * 32 + 16 + r] = rows[r].minima[g];
    }
  }
  for (int i = 0; i < kSixBits; ++i)
    out[i] = static_cast<uint8_t>(numbers[i] | (numbers[192 + i % kVector] >> 2 * (i / kVector) & 3) << 6);
}

void write_block(const Layout& layout, const Block* rows, uint8_t* out) {
  uint8_t* p = out;
  const auto put_halves = [&](uint16_t Block::* field) {
    for (int r = 0; r < kPanelRows; ++r, p += 2) std::memcpy(p, &(rows[r].*field), 2);
  };
  put_halves(&Block::unit);
  if (layout.offset_shift < 0) put_halves(&Block::minimum);
  if (layout.groups == 8 && layout.planes == Planes::kSix) {
    for (int g = 0; g < 16; ++g)
      for (int r = 0; r < kPanelRows; ++r) *p++ = rows[r].scales[g];
  } else if (layout.groups == 8) {
    write_six_bits(rows, p);
  }
  for (int g = 0; g < layout.groups; ++g) write_group(layout, rows, g, out + layout.header + g * layout.group_bytes);
}

struct Source {
  const Layout* layout;
  int block_bytes;  // of the file
  void (*read)(const uint8_t* block, Block& out);
};

const Source* source_of(int32_t format) {
  static constexpr Source kQ4_0Source{&kQ4_0, 18, read_q4_0}, kQ4_1Source{&kQ4_1, 20, read_q4_1},
      kQ5_0Source{&kQ5_0, 22, read_q5_0}, kQ5_1Source{&kQ5_1, 24, read_q5_1}, kQ8_0Source{&kQ8_0, 34, read_q8_0},
      kQ4_KSource{&kQ4_K, 144, read_q4_k}, kQ5_KSource{&kQ5_K, 176, read_q5_k}, kQ6_KSource{&kQ6_K, 210, read_q6_k};
  switch (format) {
    case PAGED_Q4_0:
      return &kQ4_0Source;
    case PAGED_Q4_1:
      return &kQ4_1Source;
    case PAGED_Q5_0:
      return &kQ5_0Source;
    case PAGED_Q5_1:
      return &kQ5_1Source;
    case PAGED_Q8_0:
      return &kQ8_0Source;
    case PAGED_Q4_K:
      return &kQ4_KSource;
    case PAGED_Q5_K:
      return &kQ5_KSource;
    case PAGED_Q6_K:
      return &kQ6_KSource;
    default:
      return nullptr;
  }
}

// A stream through hundreds of megabytes misses the TLB every 4 KiB otherwise. Advice only: no answer is needed.
void advise_huge_pages(uint8_t* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace
}  // namespace paged

// Bytes of a packed weight, or -1 when the format is unknown or cols is no multiple of its block.
PAGED_EXPORT int64_t paged_packed_bytes(int32_t format, int32_t rows, int32_t cols) {
  const paged::Source* source = paged::source_of(format);
  if (source == nullptr || cols % (source->layout->groups * paged::kGroup) != 0) return -1;
  const int64_t panels = (rows + paged::kPanelRows - 1) / paged::kPanelRows;
  return panels * (cols / (source->layout->groups * paged::kGroup)) * source->layout->block_bytes();
}

// Packs [rows, cols] of GGUF blocks into `out` (paged_packed_bytes); rows past the last are zero.
PAGED_EXPORT void paged_pack(int32_t format, const uint8_t* raw, int32_t rows, int32_t cols, uint8_t* out,
                             int32_t num_threads) {
  using namespace paged;
  const Source& source = *source_of(format);
  const Layout& layout = *source.layout;
  const int64_t blocks = cols / (layout.groups * kGroup), row_bytes = blocks * source.block_bytes;
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  advise_huge_pages(out, panels * blocks * layout.block_bytes());
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    Block block[kPanelRows] = {};
    for (int64_t b = 0; b < blocks; ++b) {
      for (int r = 0; r < kPanelRows && p * kPanelRows + r < rows; ++r)
        source.read(raw + (p * kPanelRows + r) * row_bytes + b * source.block_bytes, block[r]);
      write_block(layout, block, out + (p * blocks + b) * layout.block_bytes());
    }
  }
}
