// Declares the part of the C interface that packs, decodes and quantizes matrices. structures_packing.py mirrors each
// structure field by field.
#pragma once

#include <cstdint>

extern "C" {

// Memory layout of codes. STREAM: a bit stream per row, in 32-bit words that may be strided. HIGH_FIRST: 4-bit codes
// whose first is the high half of a byte. OF_EIGHT_ROWS: a 32-bit word per column holds the 4-bit codes of eight rows,
// 0 2 4 6 1 3 5 7 from the lowest bits up.
enum PagedCodeForm : int32_t { PAGED_CODES_STREAM = 0, PAGED_CODES_HIGH_FIRST = 1, PAGED_CODES_OF_EIGHT_ROWS = 2 };

// Codes [rows, cols]; cols is a multiple of 32.
struct paged_codes {
  const uint8_t* data;
  int64_t row_bytes;   // from a row, or eight rows, to the next
  int64_t word_bytes;  // from one 32-bit word of a row, or of a column, to the next
  int32_t bits;
  int32_t form;
  int32_t mask;  // code = (stored ^ flip) & mask
  int32_t flip;
};

// out = [rows, cols] packed in panels (layout.h) of a grouped format; all inputs are contiguous. A row has one scale
// per block, or two per block for levels with groups of 16 columns. Scales are stored as float16 in a float32 unit per
// row. Minima are stored the same way, or as float16 multiples of the scales if all of a row's are close to such
// multiples.
struct paged_grouped_args {
  paged_codes codes;
  const float* scales;
  const float* minima;    // null: none; always with levels
  const uint8_t* levels;  // [16], stored plus 128; null: codes are numbers
  uint8_t* out;           // paged_packed_bytes
  float scale_factor;     // multiplies scales
  float minimum_factor;   // added to minima, in units of the scale
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
};

// out [rows, cols] = code * scale + minimum, where the code is looked up in levels if there are any.
struct paged_decode_grouped_args {
  paged_codes codes;
  const float* scales;  // [rows, groups]
  const float* minima;  // [rows, groups]; null: none
  const float* levels;  // [2^bits]; null: codes are numbers
  float* out;
  int32_t group_cols;  // columns that share a scale; a row's last group may be shorter
  int32_t rows;
  int32_t cols;
  int32_t num_threads;
};

// out = x [rows, cols], float32, bfloat16 or float16, contiguous, packed in panels (layout.h) of a dense format.
struct paged_dense_args {
  const void* x;
  uint8_t* out;  // paged_packed_bytes
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t dtype;
  int32_t num_threads;
  int32_t reserved;
};

// out [rows, bytes of a row] = GGUF blocks of x [rows, cols], float32, bfloat16 or float16.
struct paged_quantize_args {
  const void* x;
  const float* importance;  // [cols]: weight of each column's squared error; null: all 1
  uint8_t* out;
  int64_t x_stride;
  int32_t format;
  int32_t rows;
  int32_t cols;  // a multiple of the format's block
  int32_t dtype;
  int32_t num_threads;
  int32_t reserved;
};

// How a group's scale is found. EDGE: the end of its range further from zero is exact. HALF_QUADRATIC: half-quadratic
// optimization. LEVELS: the largest magnitude, which multiplies the levels.
enum PagedFit : int32_t { PAGED_FIT_EDGE = 0, PAGED_FIT_HALF_QUADRATIC = 1, PAGED_FIT_LEVELS = 2 };

// Quantizes x [rows, cols], float32, bfloat16 or float16, to codes with float16 scales per 64 columns; all outputs are
// contiguous.
struct paged_quantize_groups_args {
  const void* x;
  uint8_t* codes;          // [rows, cols]
  float* scales;           // [rows, groups]
  float* minima;           // [rows, groups]; null with levels
  const float* between;    // [15]: midpoints between ascending levels; null: codes are numbers
  const uint8_t* numbers;  // [16]: the codes of these levels; null if between is
  int64_t x_stride;        // in elements
  int32_t fit;             // PagedFit
  int32_t bits;
  int32_t rows;
  int32_t cols;  // a multiple of 32
  int32_t dtype;
  int32_t num_threads;
};

}  // extern "C"
