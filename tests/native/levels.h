// Provides random data in the library's own formats, and the comparison of ISA levels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "abi.h"
#include "layout.h"
#include "simd.h"

extern "C" {
const char* paged_level_name(int32_t level);
int32_t paged_level_runs_here(int32_t level);
paged_workspace* paged_workspace_new();
void paged_workspace_delete(paged_workspace* workspace);
int64_t paged_packed_bytes(int32_t format, int32_t rows, int32_t cols);
void paged_pack(int32_t format, const uint8_t* raw, int32_t rows, int32_t cols, uint8_t* out, int32_t num_threads);
void paged_pack_grouped(const paged_grouped_args* args);
int32_t paged_pack_dense(int32_t level, const paged_dense_args* args);
int32_t paged_linear(int32_t level, const paged_linear_args* args);
int32_t paged_head_product(int32_t level, const paged_head_product_args* args);
int32_t paged_experts(int32_t level, const paged_experts_args* args);
int32_t paged_route(int32_t level, const paged_route_args* args);
int32_t paged_attention(int32_t level, const paged_attention_args* args);
int32_t paged_decoder(int32_t level, const paged_decoder_args* args);
int32_t paged_quantize(int32_t level, const paged_quantize_args* args);
int32_t paged_quantize_groups(int32_t level, const paged_quantize_groups_args* args);
int32_t paged_draw(int32_t level, const paged_draw_args* args);
int32_t paged_logprobs(int32_t level, const paged_logprobs_args* args);
int32_t paged_rows(int32_t level, const paged_rows_args* args);
int32_t paged_short_conv(int32_t level, const paged_short_conv_args* args);
int32_t paged_gated_delta(int32_t level, const paged_gated_delta_args* args);
int32_t paged_mamba2(int32_t level, const paged_mamba2_args* args);
}

namespace levels {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 12345) {}

  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  // Approximately normal: the sum of four uniform numbers, with variance 1.
  float normal() {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits() % 65536) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
  }
  std::vector<float> normal(int64_t count) {
    std::vector<float> out(count);
    for (float& v : out) v = normal();
    return out;
  }

 private:
  uint64_t state_;
};

inline std::vector<uint8_t> as_dtype(const std::vector<float>& x, int32_t dtype) {
  const size_t size = dtype == PAGED_FLOAT32 ? 4 : 2;
  std::vector<uint8_t> out(size * x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t half = dtype == PAGED_BFLOAT16 ? paged::to_bfloat16(x[i]) : paged::to_half(x[i]);
    std::memcpy(out.data() + size * i, size == 4 ? static_cast<const void*>(&x[i]) : &half, size);
  }
  return out;
}

inline std::vector<float> as_floats(const std::vector<uint8_t>& raw, int32_t dtype) {
  const size_t size = dtype == PAGED_FLOAT32 ? 4 : 2;
  std::vector<float> out(raw.size() / size);
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t half;
    std::memcpy(size == 4 ? static_cast<void*>(&out[i]) : &half, raw.data() + size * i, size);
    if (size == 4) continue;
    const bool brain = dtype == PAGED_BFLOAT16;
    out[i] = brain ? paged::from_bits(static_cast<uint32_t>(half) << 16) : paged::half_to_float(half);
  }
  return out;
}

inline std::vector<float> numbers(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

inline int portable_level() {
  int level = 0;
  while (paged_level_name(level + 1) != nullptr) ++level;
  return level;
}

inline std::vector<uint8_t> quantized(int level, const std::vector<uint8_t>& x, int32_t dtype, int32_t format, int rows,
                                      int cols, const float* importance = nullptr) {
  // Upper bound: a packed panel of 16 rows is at least as large as one row's blocks.
  std::vector<uint8_t> out(paged_packed_bytes(format, 16, cols) * rows);
  const paged_quantize_args args{x.data(), importance, out.data(), cols, format, rows, cols, dtype, 1, 0};
  if (paged_quantize(level, &args) != 0) fail("quantize failed");
  return out;
}

// Added to the number of a block or grouped format: multiply in the Hadamard form, which is for many rows.
constexpr int32_t kInHadamard = 1 << 30;

// A random matrix in one of the library's formats.
struct Weight {
  std::vector<uint8_t> data;
  paged_weight packed;

  Weight(int32_t form, int rows, int cols, Random& random) {
    const int32_t format = form % kInHadamard;
    data.resize(paged_packed_bytes(format, rows, cols));
    packed = {data.data(), nullptr, nullptr, format, rows, cols, form >= kInHadamard};
    if (paged::is_grouped(format)) {
      pack_grouped(random);
      return;
    }
    std::vector<float> x = random.normal(static_cast<int64_t>(rows) * cols);
    for (float& v : x) v *= 0.1f;
    const auto raw = as_dtype(x, PAGED_FLOAT32);
    if (paged::is_dense(format)) {
      const paged_dense_args args{raw.data(), data.data(), format, rows, cols, PAGED_FLOAT32, 1, 0};
      if (paged_pack_dense(portable_level(), &args) != 0) fail("pack_dense failed");
      return;
    }
    paged_pack(format, quantized(portable_level(), raw, PAGED_FLOAT32, format, rows, cols).data(), rows, cols,
               data.data(), 1);
  }
  Weight(const Weight&) = delete;

 private:
  // Packs random codes, scales, minima and levels; in every other row, minima are multiples of the scales.
  void pack_grouped(Random& random) {
    const int rows = packed.rows, cols = packed.cols;
    static constexpr int kBits[] = {2, 3, 4, 5, 6, 8, 4, 4};
    std::vector<uint8_t> codes(static_cast<size_t>(rows) * cols), table(16);
    const uint32_t most = 1u << kBits[paged::grouped_kind(packed.format)];
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.bits() % most);
    for (uint8_t& level : table) level = static_cast<uint8_t>(random.bits());
    const int group = paged::grouped_kind(packed.format) == PAGED_GROUPED_LEVELS_OF_16 ? 16 : packed.format >> 16 << 5;
    const size_t groups = (cols + group - 1) / group;
    std::vector<float> scales(rows * groups), minima(scales.size());
    for (float& scale : scales) scale = 0.002f + 0.001f * random.normal();
    for (size_t i = 0; i < minima.size(); ++i)
      minima[i] = i / groups % 2 == 0 ? scales[i] * static_cast<float>(random.bits() % 8) : 0.05f * random.normal();
    const bool has_levels = paged::grouped_layout(packed.format).has_levels;
    const paged_codes bytes{codes.data(), cols, 4, 8, PAGED_CODES_STREAM, 255, 0};
    const paged_grouped_args args{bytes, scales.data(), has_levels ? nullptr : minima.data(), table.data(), data.data(),
                                  1.0f,  0.0f,          packed.format,                        rows,         cols,
                                  1};
    paged_pack_grouped(&args);
  }
};

// Sequences with pages in random order.
struct Batch {
  std::vector<int32_t> starts, tables, lengths;
  std::vector<int32_t> bidirectional_from;  // empty: all causal
  int max_blocks;
  int num_blocks;

  Batch(const std::vector<int>& tokens, const std::vector<int>& contexts, int block_size, Random& random)
      : starts{0}, lengths(contexts.begin(), contexts.end()) {
    for (const int count : tokens) starts.push_back(starts.back() + count);
    max_blocks = *std::max_element(contexts.begin(), contexts.end()) / block_size + 1;
    num_blocks = max_blocks * static_cast<int>(tokens.size());
    for (int i = 0; i < num_blocks; ++i) tables.push_back(i);
    for (int i = num_blocks - 1; i > 0; --i) std::swap(tables[i], tables[random.bits() % (i + 1)]);
  }
  int num_tokens() const { return starts.back(); }
  std::vector<int64_t> slots(int block_size) const {
    std::vector<int64_t> out;
    for (size_t s = 0; s < lengths.size(); ++s)
      for (int at = lengths[s] - (starts[s + 1] - starts[s]); at < lengths[s]; ++at)
        out.push_back(tables[s * max_blocks + at / block_size] * static_cast<int64_t>(block_size) + at % block_size);
    return out;
  }
  paged_batch view() const {
    const int32_t* seen_by_all = bidirectional_from.empty() ? nullptr : bidirectional_from.data();
    const auto count = static_cast<int32_t>(lengths.size());
    return {starts.data(), tables.data(), lengths.data(), nullptr, seen_by_all, nullptr, count, max_blocks};
  }
};

struct Cache {
  std::vector<uint8_t> key, value, key_scale, value_scale;

  Cache(const paged_heads& heads, int num_blocks, Random& random) {
    const int64_t vectors = static_cast<int64_t>(num_blocks) * heads.block_size * heads.num_kv_heads;
    const bool q4 = heads.cache_dtype == PAGED_Q4;
    for (std::vector<uint8_t>* each : {&key, &value}) {
      if (q4) {
        each->resize(vectors * heads.head_dim / 2);
        for (uint8_t& codes : *each) codes = static_cast<uint8_t>(random.bits());
        continue;
      }
      if (heads.cache_dtype != PAGED_FLOAT8_E4M3) {
        *each = as_dtype(random.normal(vectors * heads.head_dim), heads.cache_dtype);
        continue;
      }
      each->resize(vectors * heads.head_dim);
      for (uint8_t& code : *each) {
        do code = static_cast<uint8_t>(random.bits());
        while ((code & 0x7f) == 0x7f);  // NaN
      }
    }
    for (std::vector<uint8_t>* each : {&key_scale, &value_scale}) {
      std::vector<float> scales;
      for (int64_t i = 0; i < vectors * (q4 ? heads.head_dim / 32 : 1); ++i) {
        const float varied = 1.0f + 0.1f * std::fabs(random.normal());
        scales.push_back(varied * (q4 ? 0.25f : 0.004f));
        if (q4) scales.push_back(-1.9f * varied);  // a minimum: codes up to 15 are of either sign
      }
      *each = as_dtype(scales, q4 ? PAGED_BFLOAT16 : PAGED_FLOAT32);
    }
  }
  paged_cache pages() const {
    const auto bytes = [](const std::vector<uint8_t>& v) { return const_cast<uint8_t*>(v.data()); };
    return {bytes(key), bytes(value), bytes(key_scale), bytes(value_scale), nullptr, nullptr};
  }
};

// Calls kernels on one ISA level.
struct Run {
  int level;
  paged_workspace* workspace;

  void done(int32_t code) const {
    if (code != 0) fail(std::string(paged_level_name(level)) + " returned " + std::to_string(code));
  }
};

// Largest difference of a result in norm, relative to the portable level. `pairs`: also relative to any level that
// multiplies bfloat16 pairs. `shorts`: levels that multiply 16-bit codes instead need to agree only with each other.
struct Bound {
  double relative;
  bool pairs = false;
  bool shorts = false;
};

class Levels {
 public:
  Levels() : workspace_(paged_workspace_new()) {
    for (int level = 0; paged_level_name(level) != nullptr; ++level)
      if (paged_level_runs_here(level) != 0) runs_.push_back(level);
  }
  ~Levels() { paged_workspace_delete(workspace_); }
  Levels(const Levels&) = delete;

  template <class Kernel>
  void compare(const std::string& name, const Bound& bound, const Kernel& kernel) {
    if (runs_.size() == 1) return;
    const std::vector<float> expected = kernel(Run{runs_.back(), workspace_});
    for (const float v : expected)
      if (!std::isfinite(v)) fail(name + ": a result is not finite");
    if (std::all_of(expected.begin(), expected.end(), [](float v) { return v == 0.0f; }))
      fail(name + ": every result is zero, which all levels would agree on");
    std::vector<float> fused, coded;
#if defined(__FP_FAST_FMAF)
    fused = expected;  // here the portable level fuses too
#endif
    for (size_t i = 0; i + 1 < runs_.size(); ++i) {
      const std::string level = paged_level_name(runs_[i]);
      const std::vector<float> got = kernel(Run{runs_[i], workspace_});
      ++comparisons_;
      const double distance = relative(got, expected);
      if (!(distance <= bound.relative)) complain(level, name, distance, bound.relative);
      if (bound.pairs && takes_pairs(level)) continue;
      const bool codes = bound.shorts && multiplies_shorts(level);
      std::vector<float>& alike = codes ? coded : fused;
      if (alike.empty()) alike = got;
      const char* other = codes ? " beside another that has codes" : " beside another that fuses";
      if (got != alike) complain(level + other, name, relative(got, alike), 0.0);
    }
  }
  // Prints the levels and returns the exit status.
  int report() const {
    for (const int level : runs_) std::printf("%s ", paged_level_name(level));
    std::printf(": %d comparisons, %d failures\n", comparisons_, failures_);
    return failures_ > 0 ? 1 : 0;
  }

 private:
  static bool takes_pairs(const std::string& level) {
    return level == "amx" || level == "avx512_bf16" || level == "neon_i8mm";
  }
  static bool multiplies_shorts(const std::string& level) { return level == "avx2" || level == "avx_vnni"; }
  static double relative(const std::vector<float>& got, const std::vector<float>& expected) {
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double difference = static_cast<double>(got[i]) - expected[i];
      error += difference * difference, norm += static_cast<double>(expected[i]) * expected[i];
    }
    return error == 0.0 ? 0.0 : std::sqrt(error / norm);
  }
  void complain(const std::string& level, const std::string& name, double distance, double allowed) {
    ++failures_;
    std::printf("%s: %s differs by %.2g, allowed is %.2g\n", level.c_str(), name.c_str(), distance, allowed);
  }

  paged_workspace* workspace_;
  std::vector<int> runs_;
  int comparisons_ = 0;
  int failures_ = 0;
};

}  // namespace levels
