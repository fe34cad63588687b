// The vector primitives in plain C++ for any machine; the compiler vectorizes the 16-lane loops for its target (NEON,
// SSE2).
#pragma once

#include <cmath>
#include <cstdint>

namespace paged {
namespace {

struct Bytes {
  uint8_t v[64];
};
struct Ints {
  int32_t v[16];
};
struct Floats {
  float v[16];
};
struct Shorts {
  int16_t v[32];
};

constexpr int kMaxTile = 4;
constexpr int kDenseTile = 3;
constexpr int kDenseWide = 2;
constexpr int kDenseRows = 3;
constexpr int kDensePanels = 2;
constexpr int kTokenTile = 2;
constexpr int kCodesTogether = 4;
constexpr bool kOnePanelAtATime = false;

template <class F>
inline Bytes each_byte(F f) {
  Bytes r;
  for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(f(i));
  return r;
}
template <class F>
inline Shorts each_short(F f) {
  Shorts r;
  for (int i = 0; i < 32; ++i) r.v[i] = static_cast<int16_t>(f(i));
  return r;
}
template <class F>
inline Ints each_int(F f) {
  Ints r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
template <class F>
inline Floats each_float(F f) {
  Floats r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline Bytes load_bytes(const uint8_t* p) {
  return each_byte([p](int i) { return p[i]; });
}
inline void store_bytes(uint8_t* p, Bytes a) { __builtin_memcpy(p, a.v, 64); }
inline Bytes and_mask(Bytes a, int mask) {
  return each_byte([&](int i) { return a.v[i] & mask; });
}
template <int N>
inline Bytes shift_right(Bytes a) {
  return each_byte([&](int i) { return a.v[i] >> N; });
}
template <int N>
inline Bytes shift_left(Bytes a) {
  return each_byte([&](int i) { return a.v[i] << N; });
}
inline Bytes merge(Bytes a, Bytes b, int mask) {
  return each_byte([&](int i) { return a.v[i] | (b.v[i] & mask); });
}
// Looks up table[a] for each byte; all are below 16.
inline Bytes look_up(const uint8_t* table, Bytes a) {
  return each_byte([&](int i) { return table[a.v[i]]; });
}

inline Bytes add_bytes(Bytes a, Bytes b) {
  return each_byte([&](int i) { return a.v[i] + b.v[i]; });
}
inline Bytes sub_bytes(Bytes a, Bytes b) {
  return each_byte([&](int i) { return a.v[i] - b.v[i]; });
}
inline Bytes sub_byte(Bytes a, int b) {
  return each_byte([&](int i) { return a.v[i] - b; });
}
inline Bytes butterfly_bytes(Bytes a) {
  return each_byte([&](int i) { return (i & 2) == 0 ? a.v[i] + a.v[i + 2] : a.v[i - 2] - a.v[i]; });
}
template <int kFactor>
inline void widen(Bytes a, Shorts& sum, Shorts& difference) {
  const auto at = [&](int i) { return kFactor * static_cast<int8_t>(a.v[i]); };
  sum = each_short([&](int i) { return at(2 * i) + at(2 * i + 1); });
  difference = each_short([&](int i) { return at(2 * i) - at(2 * i + 1); });
}
inline Shorts load_shorts(const int16_t* p) {
  return each_short([p](int i) { return p[i]; });
}
inline void store_shorts(int16_t* p, Shorts a) { __builtin_memcpy(p, a.v, 64); }
inline Shorts add_shorts(Shorts a, Shorts b) {
  return each_short([&](int i) { return a.v[i] + b.v[i]; });
}
inline Shorts sub_shorts(Shorts a, Shorts b) {
  return each_short([&](int i) { return a.v[i] - b.v[i]; });
}
inline Shorts butterfly_shorts(Shorts a) {
  return each_short([&](int i) { return (i & 1) == 0 ? a.v[i] + a.v[i + 1] : a.v[i - 1] - a.v[i]; });
}
inline Shorts broadcast_short(int a) {
  return each_short([a](int) { return a; });
}
inline Shorts max_magnitude_short(Shorts so_far, Shorts a) {
  return each_short([&](int i) {
    const int magnitude = a.v[i] < 0 ? -a.v[i] : a.v[i];
    return magnitude > so_far.v[i] ? magnitude : so_far.v[i];
  });
}
inline Shorts multiply_high(Shorts a, Shorts b) {
  return each_short([&](int i) { return (a.v[i] * b.v[i] + 0x4000) >> 15; });
}
inline Ints larger_of_two(Shorts a) {
  return each_int([&](int i) { return a.v[2 * i] > a.v[2 * i + 1] ? a.v[2 * i] : a.v[2 * i + 1]; });
}
inline Ints first_of_two(Shorts a) {
  return each_int([&](int i) { return a.v[2 * i]; });
}
inline Shorts replace_first(Shorts a, Ints first) {
  return each_short([&](int i) { return (i & 1) == 0 ? first.v[i / 2] : a.v[i]; });
}
inline Shorts twice(Ints a) {
  return each_short([&](int i) { return a.v[i / 2]; });
}
inline Bytes join_bytes(Shorts even, Shorts odd) {
  return each_byte([&](int i) { return ((i & 1) == 0 ? even.v[i / 2] : odd.v[i / 2]) ^ 0x80; });
}

inline Ints zero_ints() {
  return each_int([](int) { return 0; });
}
template <int N>
inline Ints broadcast_shifted(const int32_t* p) {
  const int32_t a = *p * (1 << N);
  return each_int([a](int) { return a; });
}
template <bool kEightBit>
inline Ints dot4(Ints sum, Bytes w, const int8_t* x) {
  return each_int([&](int i) {
    const uint8_t* row = w.v + 4 * i;
    return sum.v[i] + row[0] * x[0] + row[1] * x[1] + row[2] * x[2] + row[3] * x[3];
  });
}
inline Ints add(Ints a, Ints b) {
  return each_int([&](int i) { return a.v[i] + b.v[i]; });
}
inline int32_t sum_of(Ints a) {
  int32_t total = 0;
  for (const int32_t v : a.v) total += v;
  return total;
}
inline void store_int8(int8_t* p, Ints a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
// Stores 16 columns of a tile's rows as [4 quads][kTokenTile][4] codes, all within int8.
inline void store_quads(int8_t* p, const Ints (&rows)[kTokenTile]) {
  for (int i = 0; i < 16; ++i)
    for (int r = 0; r < kTokenTile; ++r)
      p[(i / 4 * kTokenTile + r) * 4 + i % 4] = static_cast<int8_t>(rows[r].v[i]);
}

inline void store_uint8(uint8_t* p, Ints a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(a.v[i]);
}

inline Floats zero_floats() {
  return each_float([](int) { return 0.0f; });
}
inline Floats broadcast(float a) {
  return each_float([a](int) { return a; });
}
inline Floats load_floats(const float* p) {
  return each_float([p](int i) { return p[i]; });
}
inline void store_floats(float* p, Floats a) { __builtin_memcpy(p, a.v, 64); }
inline Floats load_half(const uint8_t* p) {
  return each_float([p](int i) {
    uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    return half_to_float(h);
  });
}
inline Floats load_bfloat16(const uint16_t* p) {
  return each_float([p](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
inline void store_bfloat16(uint16_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = to_bfloat16(a.v[i]);
}
inline void store_half(uint16_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = to_half(a.v[i]);
}
inline Floats load_even_bfloat16(const uint8_t* p) {
  return each_float([p](int i) {
    uint16_t half;
    __builtin_memcpy(&half, p + 4 * i, 2);
    return from_bits(static_cast<uint32_t>(half) << 16);
  });
}
inline Floats load_odd_bfloat16(const uint8_t* p) { return load_even_bfloat16(p + 2); }
inline Floats load_uint8(const uint8_t* p) {
  return each_float([p](int i) { return static_cast<float>(p[i]); });
}
inline Floats load_int8(const uint8_t* p) {
  return each_float([p](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
// Loads 16 lower or upper halves of bytes.
template <bool kUpper>
inline Floats load_nibbles(const uint8_t* p) {
  return each_float([p](int i) { return static_cast<float>(kUpper ? p[i] >> 4 : p[i] & 15); });
}
inline Floats to_floats(Ints a) {
  return each_float([&](int i) { return static_cast<float>(a.v[i]); });
}
inline Floats as_floats(Ints bits) {
  return each_float([&](int i) { return from_bits(static_cast<uint32_t>(bits.v[i])); });
}
// For |a| < 2^22, adding and subtracting 1.5 * 2^23 rounds to nearest even in float32, without a call per lane.
inline float nearest(float a) { return (a + 12582912.0f) - 12582912.0f; }
inline Ints to_nearest(Floats a) {
  return each_int([&](int i) { return static_cast<int32_t>(nearest(a.v[i])); });
}
inline Floats add(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] / b.v[i]; });
}
// Not fused on machines without the instruction: std::fma would be a library call per lane.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__FP_FAST_FMAF)
  return each_float([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
#else
  return each_float([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
inline Floats minimum(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats maximum(Floats a, Floats b) {
  return each_float([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline float sum_of(Floats a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float max_of(Floats a) {
  float m = a.v[0];
  for (const float v : a.v) m = v > m ? v : m;
  return m;
}
inline Ints max_magnitude(Ints so_far, Floats a) {
  return each_int([&](int i) {
    const auto bits = static_cast<int32_t>(bits_of(a.v[i]) & 0x7fffffff);
    return bits > so_far.v[i] ? bits : so_far.v[i];
  });
}
inline int32_t max_of(Ints a) {
  int32_t m = a.v[0];
  for (const int32_t v : a.v) m = v > m ? v : m;
  return m;
}
inline Floats scale_by_power(Floats p, Floats n) {
  return each_float(
      [&](int i) { return p.v[i] * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
inline Floats round_to_4_bits(Floats a) {
  return each_float([&](int i) { return from_bits((bits_of(a.v[i]) + 0x80000) & ~0xfffffu); });
}
inline Floats floor_of(Floats a) {
  return each_float([&](int i) { return __builtin_floorf(a.v[i]); });
}
// fraction is a - floor(a); scale_by_floor is p * 2^floor(a).
inline Floats fraction(Floats a) { return sub(a, floor_of(a)); }
inline Floats scale_by_floor(Floats p, Floats a) { return scale_by_power(p, floor_of(a)); }
inline Floats round_to_integral(Floats a) {
  return each_float([&](int i) { return nearest(a.v[i]); });
}

inline Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
  return each_float([&](int i) { return a.v[i] > b.v[i] ? yes.v[i] : no.v[i]; });
}
inline Floats zero_unless_above(Floats x, float limit, Floats value) {
  return each_float([&](int i) { return x.v[i] <= limit ? 0.0f : value.v[i]; });
}
// Loads 16 f8e4m3 values times 1 / 256: sign, exponent and mantissa move to the same places of a float16.
inline Floats load_float8(const uint8_t* p) {
  return each_float(
      [p](int i) { return half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}
template <int kStride>
inline Floats butterfly(Floats a) {
  return each_float([&](int i) { return (i & kStride) == 0 ? a.v[i] + a.v[i + kStride] : a.v[i - kStride] - a.v[i]; });
}
inline void transpose(Floats rows[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float a = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = a;
    }
  }
}

// sums_of returns the sum of each of 16 vectors.
constexpr int kSumLanes = 16;
inline void store_lanes(float* p, Floats a) { store_floats(p, a); }
inline Floats sums_of(const float (*vectors)[kSumLanes]) {
  Floats sums;
  for (int i = 0; i < 16; ++i) sums.v[i] = sum_of(load_floats(vectors[i]));
  return sums;
}

}  // namespace
}  // namespace paged
