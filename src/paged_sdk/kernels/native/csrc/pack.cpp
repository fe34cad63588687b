// Packs GGUF blocks and grouped codes into panels (layout.h). Runs once, at load: plain loops, one pass over the file's
// bytes.
#include <cmath>
#include <cstring>
#include <new>

#include "blocks.h"
#include "codes.h"
#include "pages.h"
#include "pool.h"
#include "simd.h"

namespace paged {
namespace {

// Packs a group of 16 rows into its planes. A quad, four bytes of a row, is one word of a vector.
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

// Packs eight groups of scales and minima (`with_minima`), or sixteen groups of scales.
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

// The scales and minima of a row as they are packed: float16 numbers in units of the row.
class RowScales {
 public:
  RowScales(const paged_grouped_args& args, int count, int64_t row)
      : args_(args),
        count_(count),
        scales_(args.scales + row * count),
        minima_(args.minima == nullptr ? nullptr : args.minima + row * count) {
    scale_unit_ = unit_of([this](int i) { return scales_[i]; });
    minimum_unit_ = minima_ == nullptr || in_scales() ? 0.0f : unit_of([this](int i) { return wanted(i); });
  }

  float unit() const { return scale_unit_ * args_.scale_factor; }
  uint16_t scale(int i) const { return i < count_ ? to_half(scales_[i] / scale_unit_) : 0; }
  // 0: minima are multiples of the scales.
  float minimum_unit() const { return minimum_unit_; }
  uint16_t minimum(int i) const {
    if (minima_ == nullptr) return to_half(args_.minimum_factor);
    return minimum_unit_ == 0.0f ? multiple(i) : to_half(wanted(i) / minimum_unit_);
  }

 private:
  float factored(int i) const { return scales_[i] * args_.scale_factor; }
  float wanted(int i) const { return minima_[i] + args_.minimum_factor * factored(i); }
  uint16_t multiple(int i) const {
    const float found = minima_[i] / factored(i) + args_.minimum_factor;
    return to_half(std::isfinite(found) ? found : 0.0f);
  }
  // Whether minima are float16 multiples of the scales, to within 2^-16 of a scale.
  bool in_scales() const {
    for (int i = 0; i < count_; ++i) {
      const float off = half_to_float(multiple(i)) * factored(i) - wanted(i);
      if (!(std::fabs(off) <= 0x1p-16f * std::fabs(factored(i)))) return false;
    }
    return true;
  }
  // A single number is its row's unit. For several numbers, the unit is a power of two that brings the largest to 2^14
  // or above.
  template <class Number>
  float unit_of(Number number) const {
    float largest = 0.0f;
    for (int i = 0; i < count_; ++i) {
      const float magnitude = std::fabs(number(i));
      if (!std::isfinite(magnitude)) return 1.0f;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest == 0.0f) return 1.0f;
    if (count_ == 1) return largest;
    int exponent = 0;
    std::frexp(largest, &exponent);
    return std::ldexp(1.0f, (exponent < -100 ? -100 : exponent) - 15);
  }

  const paged_grouped_args& args_;
  const int count_;
  const float* const scales_;
  const float* const minima_;
  float scale_unit_, minimum_unit_;
};

// Writes sixteen 16-bit numbers, one per row.
template <class Number>
void put_halves(int count, uint8_t* out, Number number) {
  std::memset(out, 0, kHalves);
  for (int r = 0; r < count; ++r) {
    const uint16_t half = number(r);
    std::memcpy(out + 2 * r, &half, 2);
  }
}

// Packs up to 16 rows of a grouped matrix into a panel.
void write_grouped_panel(const paged_grouped_args& args, int64_t row, int count, uint8_t* out) {
  const Layout& layout = grouped_layout(args.format);
  const bool halves = layout.groups > 0;  // two scales per block
  const int in_block = layout.block_groups(args.format), in_row = args.cols / kGroup;
  const int blocks = (in_row + in_block - 1) / in_block, scales = blocks * (halves ? 2 : 1);
  std::memset(out, 0, kUnits);
  alignas(RowScales) uint8_t memory[kPanelRows * sizeof(RowScales)];
  auto* of_rows = reinterpret_cast<RowScales*>(memory);
  for (int r = 0; r < count; ++r) {
    const auto& own = *new (of_rows + r) RowScales(args, scales, row + r);
    const float unit = own.unit(), minimum_unit = own.minimum_unit();
    std::memcpy(out + 4 * r, &unit, 4);
    if (!layout.has_levels) std::memcpy(out + kVector + 4 * r, &minimum_unit, 4);
  }
  if (layout.has_levels) std::memcpy(out + kVector, args.levels, 16);
  uint8_t* p = out + kUnits;
  Block rows[kPanelRows] = {};
  for (int b = 0, group = 0; b < blocks; ++b) {
    const int first = halves ? 2 * b : b;
    put_halves(count, p, [&](int r) { return of_rows[r].scale(first); });
    if (halves) {
      put_halves(count, p + kHalves, [&](int r) { return of_rows[r].scale(first + 1); });
    } else if (!layout.has_levels) {
      put_halves(count, p + kHalves, [&](int r) { return of_rows[r].minimum(b); });
    }
    p += layout.header;
    for (int end = in_row - group < in_block ? in_row : group + in_block; group < end; ++group) {
      for (int r = 0; r < count; ++r) read_codes(args.codes, row + r, group * kGroup, rows[r].q);
      write_group(layout, rows, 0, p);
      p += layout.group_bytes;
    }
  }
}

void decode_grouped_row(const paged_decode_grouped_args& args, int64_t row) {
  const int64_t groups = (args.cols + args.group_cols - 1) / args.group_cols;
  const float* scales = args.scales + row * groups;
  const float* minima = args.minima == nullptr ? nullptr : args.minima + row * groups;
  float* out = args.out + row * args.cols;
  uint8_t q[kGroup];
  for (int col = 0; col < args.cols; col += kGroup, out += kGroup) {
    read_codes(args.codes, row, col, q);
    for (int i = 0, end = 0; i < kGroup; i = end) {
      const int group = (col + i) / args.group_cols;
      const int64_t next = (group + int64_t{1}) * args.group_cols - col;
      end = next < kGroup ? static_cast<int>(next) : kGroup;
      for (int j = i; j < end; ++j)
        out[j] = (args.levels == nullptr ? static_cast<float>(q[j]) : args.levels[q[j]]) * scales[group];
      if (minima == nullptr) continue;
      for (int j = i; j < end; ++j) out[j] += minima[group];
    }
  }
}

}  // namespace
}  // namespace paged

// Returns the bytes of a packed weight, or -1 if the format is unknown or cols is not a multiple of its block.
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

// Packs [rows, cols] of GGUF blocks into `out` (paged_packed_bytes bytes), padded with zero rows.
PAGED_EXPORT void paged_pack(int32_t format, const uint8_t* raw, int32_t rows, int32_t cols, uint8_t* out,
                             int32_t num_threads) {
  using namespace paged;
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

// Packs a grouped matrix, padded with zero rows.
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

// Decodes a grouped matrix.
PAGED_EXPORT void paged_decode_grouped(const paged_decode_grouped_args* args) {
  using namespace paged;
  parallel_for(args->num_threads, args->rows, int64_t{500} * args->cols, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) decode_grouped_row(*args, row);
  });
}
