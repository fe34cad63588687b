// GGUF blocks and dense rows into panels (layout.h). Runs once, at load: plain loops, a pass over the file's bytes.
#include <cstring>

#include "blocks.h"
#include "pages.h"
#include "pool.h"

namespace paged {
namespace {

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
    if (layout.planes == Planes::kPairs || layout.planes == Planes::kThree) {
      for (int v = 0; v < 2; ++v) {
        uint32_t pairs = 0;
        for (int i = 0; i < 4; ++i) pairs |= (quad[4 * v + i] & 0x03030303) << 2 * i;
        put(v, pairs);
      }
      uint32_t third = 0;
      for (int q = 0; q < 8; ++q) third |= (quad[q] >> 2 & 0x01010101) << q;
      if (layout.planes == Planes::kThree) put(2, third);
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

// `with_minima`: eight groups of scales and minima; else sixteen of scales.
void write_six_bits(const Block* rows, bool with_minima, uint8_t* out) {
  uint8_t numbers[256];
  for (int i = 0; i < 16; ++i) {
    for (int r = 0; r < kPanelRows; ++r) {
      const Block& row = rows[r];
      numbers[i * 16 + r] = !with_minima ? row.scales[i] : i % 2 == 0 ? row.scales[i / 2] : row.minima[i / 2];
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
  } else if (layout.planes == Planes::kPairs) {
    for (int g = 0; g < 16; ++g)
      for (int r = 0; r < kPanelRows; ++r) *p++ = static_cast<uint8_t>(rows[r].scales[g] | rows[r].minima[g] << 4);
  } else if (layout.groups == 8) {
    write_six_bits(rows, layout.planes != Planes::kThree, p);
  }
  for (int g = 0; g < layout.groups; ++g) write_group(layout, rows, g, out + layout.header + g * layout.group_bytes);
}

// Up to 16 rows of a grouped matrix into a panel.
void write_grouped_panel(const paged_grouped_args& args, int64_t row, int count, uint8_t* out) {
  const Layout& layout = grouped_layout(args.format);
  const bool halves = layout.groups > 0;  // two scales a block
  const int in_block = layout.block_groups(args.format), in_row = args.cols / kGroup;
  const int blocks = (in_row + in_block - 1) / in_block, scales = blocks * (halves ? 2 : 1);
  std::memset(out, 0, kUnits);
  std::memcpy(out, args.units + row, sizeof(float) * count);
  if (layout.has_levels) {
    std::memcpy(out + kVector, args.levels, 16);
  } else {
    std::memcpy(out + kVector, args.minimum_units + row, sizeof(float) * count);
  }
  uint8_t* p = out + kUnits;
  Block rows[kPanelRows] = {};
  for (int b = 0, group = 0; b < blocks; ++b) {
    const auto put_halves = [&](const uint16_t* numbers, int at, uint8_t* to) {
      std::memset(to, 0, kHalves);
      for (int r = 0; r < count; ++r) std::memcpy(to + 2 * r, numbers + (row + r) * scales + at, 2);
    };
    if (halves) {
      put_halves(args.scales, 2 * b, p);
      put_halves(args.scales, 2 * b + 1, p + kHalves);
    } else {
      put_halves(args.scales, b, p);
      if (!layout.has_levels) put_halves(args.minima, b, p + kHalves);
    }
    p += layout.header;
    for (int end = in_row - group < in_block ? in_row : group + in_block; group < end; ++group) {
      for (int r = 0; r < count; ++r)
        std::memcpy(rows[r].q, args.codes + (row + r) * args.cols + int64_t{group} * kGroup, kGroup);
      write_group(layout, rows, 0, p);
      p += layout.group_bytes;
    }
  }
}

// Up to 16 dense rows into a panel of vectors of kCols columns. kPairs: a row's two numbers lie side by side.
template <class Number, int kCols, bool kPairs>
void write_dense_panel(const Number* raw, int rows, int cols, Number* out) {
  constexpr int kNumbers = kVector / sizeof(Number);
  const int vectors = (cols + kCols - 1) / kCols;
  for (int r = 0; r < kPanelRows; ++r) {
    const Number* row = raw + static_cast<int64_t>(r) * cols;
    for (int col = 0; col < vectors * kCols; ++col) {
      const int place = kPairs ? r * kCols + col % kCols : col % kCols * kPanelRows + r;
      out[static_cast<int64_t>(col / kCols) * kNumbers + place] = r < rows && col < cols ? row[col] : Number{0};
    }
  }
}

template <class Number, int kCols, bool kPairs>
void pack_dense(const uint8_t* raw, int rows, int cols, uint8_t* out, int num_threads) {
  const auto* from = reinterpret_cast<const Number*>(raw);
  auto* to = reinterpret_cast<Number*>(out);
  const int64_t panels = num_panels(rows), pitch = static_cast<int64_t>((cols + kCols - 1) / kCols) * kVector;
  advise_huge_pages(out, panels * pitch);
  parallel_for(num_threads, panels, 50 * pitch, [&](int64_t first, int64_t last, int) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t row = p * kPanelRows;
      const int count = static_cast<int>(rows - row < kPanelRows ? rows - row : kPanelRows);
      write_dense_panel<Number, kCols, kPairs>(from + row * cols, count, cols, to + p * (pitch / sizeof(Number)));
    }
  });
}

void pack_dense(int32_t format, const uint8_t* raw, int rows, int cols, uint8_t* out, int num_threads) {
  if (format == PAGED_DENSE_BFLOAT16) return pack_dense<uint16_t, 2, true>(raw, rows, cols, out, num_threads);
  if (format == PAGED_DENSE_FLOAT16) return pack_dense<uint16_t, 2, false>(raw, rows, cols, out, num_threads);
  pack_dense<uint32_t, 1, false>(raw, rows, cols, out, num_threads);
}

}  // namespace
}  // namespace paged

// Bytes of a packed weight, or -1 when the format is unknown or cols is no multiple of its block.
PAGED_EXPORT int64_t paged_packed_bytes(int32_t format, int32_t rows, int32_t cols) {
  if (paged::is_dense(format)) return paged::num_panels(rows) * paged::dense_panel_bytes(format, cols);
  if (paged::is_grouped(format))
    return cols % paged::kGroup != 0
               ? -1
               : paged::num_panels(rows) * paged::grouped_layout(format).panel_bytes(format, cols);
  const paged::BlockForm* source = paged::block_form(format);
  if (source == nullptr || cols % source->layout->block_cols() != 0) return -1;
  return paged::num_panels(rows) * source->layout->panel_bytes(format, cols);
}

// Packs [rows, cols] of GGUF blocks or dense numbers into `out` (paged_packed_bytes); rows past the last are zero.
PAGED_EXPORT void paged_pack(int32_t format, const uint8_t* raw, int32_t rows, int32_t cols, uint8_t* out,
                             int32_t num_threads) {
  using namespace paged;
  if (is_dense(format)) return pack_dense(format, raw, rows, cols, out, num_threads);
  const BlockForm& source = *block_form(format);
  const Layout& layout = *source.layout;
  const int64_t blocks = cols / layout.block_cols(), row_bytes = blocks * source.block_bytes;
  const int64_t panels = num_panels(rows);
  const int64_t panel_bytes = layout.panel_bytes(format, cols);
  advise_huge_pages(out, panels * panel_bytes);
  const int64_t cost = 50 * panel_bytes;
  parallel_for(num_threads, panels, cost, [&](int64_t first, int64_t last, int) {
    for (int64_t p = first; p < last; ++p) {
      Block block[kPanelRows] = {};
      for (int64_t b = 0; b < blocks; ++b) {
        for (int r = 0; r < kPanelRows && p * kPanelRows + r < rows; ++r)
          source.read(raw + (p * kPanelRows + r) * row_bytes + b * source.block_bytes, block[r]);
        write_block(layout, block, out + (p * blocks + b) * layout.block_bytes());
      }
    }
  });
}

// Packs a grouped matrix, of whose rows past the last all is zero.
PAGED_EXPORT void paged_pack_grouped(const paged_grouped_args* args) {
  using namespace paged;
  const int64_t panels = num_panels(args->rows);
  const int64_t pitch = grouped_layout(args->format).panel_bytes(args->format, args->cols);
  advise_huge_pages(args->out, panels * pitch);
  parallel_for(args->num_threads, panels, 50 * pitch, [&](int64_t first, int64_t last, int) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t row = p * kPanelRows, left = args->rows - row;
      write_grouped_panel(*args, row, static_cast<int>(left < kPanelRows ? left : kPanelRows), args->out + p * pitch);
    }
  });
}
