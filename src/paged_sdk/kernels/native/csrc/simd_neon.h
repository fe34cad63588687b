// The vector primitives on NEON with dot products, and with int8 matrix products (i8mm) if compiled for them: four
// registers per 16 rows. Lanes are added in the same order as on other levels, and what they fuse is fused.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace paged {
namespace {

template <class Vector>
struct Quarters {
  Vector v[4];
};
using Bytes = Quarters<uint8x16_t>;
using Ints = Quarters<int32x4_t>;
using Floats = Quarters<float32x4_t>;
using Shorts = Quarters<int16x8_t>;

constexpr int kMaxTile = 4;    // 16 accumulators leave half of the 32 registers to products, scales and weights
constexpr int kDenseTile = 3;  // rows of a float product, times vectors of columns: 24 accumulators
constexpr int kDenseWide = 2;
constexpr int kDenseRows = 3;  // rows and panels of a product with dense weights: 24 accumulators
constexpr int kDensePanels = 2;
constexpr int kTokenTile = 4;  // a register holds four columns of four rows
constexpr int kCodesTogether = 4;
constexpr bool kOnePanelAtATime = true;

// Applies f to each quarter of some vectors.
template <class F, class... Vectors>
inline auto quarters(const F& f, const Quarters<Vectors>&... a) -> Quarters<decltype(f(a.v[0]...))> {
  return {f(a.v[0]...), f(a.v[1]...), f(a.v[2]...), f(a.v[3]...)};
}
template <class Vector>
inline Quarters<Vector> same(Vector a) {
  return {a, a, a, a};
}

inline Bytes load_bytes(const uint8_t* p) {
  return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
inline void store_bytes(uint8_t* p, const Bytes& a) {
  vst1q_u8(p, a.v[0]);
  vst1q_u8(p + 16, a.v[1]);
  vst1q_u8(p + 32, a.v[2]);
  vst1q_u8(p + 48, a.v[3]);
}
inline Bytes and_mask(const Bytes& a, int mask) {
  const uint8x16_t m = vdupq_n_u8(static_cast<uint8_t>(mask));
  return quarters([m](uint8x16_t v) { return vandq_u8(v, m); }, a);
}
template <int N>
inline Bytes shift_right(const Bytes& a) {
  return quarters([](uint8x16_t v) { return vshrq_n_u8(v, N); }, a);
}
template <int N>
inline Bytes shift_left(const Bytes& a) {
  return quarters([](uint8x16_t v) { return vshlq_n_u8(v, N); }, a);
}
inline Bytes merge(const Bytes& a, const Bytes& b, int mask) {
  return quarters([](uint8x16_t v, uint8x16_t w) { return vorrq_u8(v, w); }, a, and_mask(b, mask));
}
// Looks up table[a] for each byte; all are below 16.
inline Bytes look_up(const uint8_t* table, const Bytes& a) {
  const uint8x16_t levels = vld1q_u8(table);
  return quarters([levels](uint8x16_t v) { return vqtbl1q_u8(levels, v); }, a);
}

inline Bytes add_bytes(const Bytes& a, const Bytes& b) {
  return quarters([](uint8x16_t v, uint8x16_t w) { return vaddq_u8(v, w); }, a, b);
}
inline Bytes sub_bytes(const Bytes& a, const Bytes& b) {
  return quarters([](uint8x16_t v, uint8x16_t w) { return vsubq_u8(v, w); }, a, b);
}
inline Bytes sub_byte(const Bytes& a, int b) {
  const uint8x16_t w = vdupq_n_u8(static_cast<uint8_t>(b));
  return quarters([w](uint8x16_t v) { return vsubq_u8(v, w); }, a);
}
inline Bytes butterfly_bytes(const Bytes& a) {
  const auto pairs = [](uint8x16_t v) {
    const uint8x16_t partner = vreinterpretq_u8_u16(vrev32q_u16(vreinterpretq_u16_u8(v)));
    const uint8x16_t upper = vreinterpretq_u8_u32(vdupq_n_u32(0xffff0000));
    return vbslq_u8(upper, vsubq_u8(partner, v), vaddq_u8(partner, v));
  };
  return quarters(pairs, a);
}
template <int kFactor>
inline void widen(const Bytes& a, Shorts& sum, Shorts& difference) {
  for (int i = 0; i < 4; ++i) {
    const int16x8_t both = vreinterpretq_s16_u8(a.v[i]);
    const int16x8_t even = vshrq_n_s16(vshlq_n_s16(both, 8), 8), odd = vshrq_n_s16(both, 8);
    sum.v[i] = vmulq_n_s16(vaddq_s16(even, odd), kFactor);
    difference.v[i] = vmulq_n_s16(vsubq_s16(even, odd), kFactor);
  }
}
inline Shorts load_shorts(const int16_t* p) {
  return {vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)};
}
inline void store_shorts(int16_t* p, const Shorts& a) {
  for (int i = 0; i < 4; ++i) vst1q_s16(p + 8 * i, a.v[i]);
}
inline Shorts add_shorts(const Shorts& a, const Shorts& b) {
  return quarters([](int16x8_t v, int16x8_t w) { return vaddq_s16(v, w); }, a, b);
}
inline Shorts sub_shorts(const Shorts& a, const Shorts& b) {
  return quarters([](int16x8_t v, int16x8_t w) { return vsubq_s16(v, w); }, a, b);
}
// Returns the odd 16-bit numbers of b and the even ones of a.
inline int16x8_t choose_odd(int16x8_t a, int16x8_t b) {
  return vbslq_s16(vreinterpretq_u16_u32(vdupq_n_u32(0xffff0000)), b, a);
}
inline Shorts butterfly_shorts(const Shorts& a) {
  const auto pairs = [](int16x8_t v) {
    const int16x8_t partner = vrev32q_s16(v);
    return choose_odd(vaddq_s16(partner, v), vsubq_s16(partner, v));
  };
  return quarters(pairs, a);
}
inline Shorts broadcast_short(int a) { return same(vdupq_n_s16(static_cast<int16_t>(a))); }
inline Shorts max_magnitude_short(const Shorts& so_far, const Shorts& a) {
  return quarters([](int16x8_t most, int16x8_t v) { return vmaxq_s16(most, vabsq_s16(v)); }, so_far, a);
}
inline Shorts multiply_high(const Shorts& a, const Shorts& b) {
  return quarters([](int16x8_t v, int16x8_t w) { return vqrdmulhq_s16(v, w); }, a, b);
}
inline Ints larger_of_two(const Shorts& a) {
  const auto larger = [](int16x8_t v) {
    const int16x8_t most = vmaxq_s16(v, vrev32q_s16(v));
    return vshrq_n_s32(vreinterpretq_s32_s16(most), 16);
  };
  return quarters(larger, a);
}
inline Ints first_of_two(const Shorts& a) {
  return quarters([](int16x8_t v) { return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(v), 16), 16); }, a);
}
inline Shorts replace_first(const Shorts& a, const Ints& first) {
  return quarters([](int16x8_t v, int32x4_t w) { return choose_odd(vreinterpretq_s16_s32(w), v); }, a, first);
}
inline Shorts twice(const Ints& a) {
  const auto both = [](int32x4_t v) {
    return choose_odd(vreinterpretq_s16_s32(v), vreinterpretq_s16_s32(vshlq_n_s32(v, 16)));
  };
  return quarters(both, a);
}
inline Bytes join_bytes(const Shorts& even, const Shorts& odd) {
  const auto join = [](int16x8_t v, int16x8_t w) {
    const uint8x16_t upper = vreinterpretq_u8_u16(vdupq_n_u16(0xff00));
    const uint8x16_t high = vreinterpretq_u8_s16(vshlq_n_s16(w, 8));
    return veorq_u8(vbslq_u8(upper, high, vreinterpretq_u8_s16(v)), vdupq_n_u8(0x80));
  };
  return quarters(join, even, odd);
}
inline Floats as_floats(const Ints& bits) {
  return quarters([](int32x4_t v) { return vreinterpretq_f32_s32(v); }, bits);
}

inline Ints zero_ints() { return same(vdupq_n_s32(0)); }
template <int N>
inline Ints broadcast_shifted(const int32_t* p) {
  return same(vshlq_n_s32(vld1q_dup_s32(p), N));
}
// sum[row] += w[row, 0..3] . x[4 kFour ... 4 kFour + 3]
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kDotSubtracts128 = false;

template <bool kEightBit, int kFour>
inline Ints dot_four(const Ints& sum, const Bytes& w, int8x16_t x) {
  return quarters([x](int32x4_t s, uint8x16_t v) { return vusdotq_laneq_s32(s, v, x, kFour); }, sum, w);
}
#else
// Both factors are signed. Weights below 128 are unchanged; toggling the top bit of 8-bit weights subtracts 128, which
// their sums must lose anyway.
constexpr bool kDotSubtracts128 = true;

template <bool kEightBit, int kFour>
inline Ints dot_four(const Ints& sum, const Bytes& w, int8x16_t x) {
  const auto dot = [x](int32x4_t s, uint8x16_t v) {
    const uint8x16_t code = kEightBit ? veorq_u8(v, vdupq_n_u8(0x80)) : v;
    return vdotq_laneq_s32(s, vreinterpretq_s8_u8(code), x, kFour);
  };
  return quarters(dot, sum, w);
}
#endif
// lo[row] += w[0..3][row] . x[0..15], hi[row] += w[4..7][row] . x[16..31]
template <bool kEightBit>
inline void dot_halves(const Bytes (&w)[8], const int8_t* x, Ints& lo, Ints& hi) {
  const int8x16_t first = vld1q_s8(x), second = vld1q_s8(x + 16);
  lo = dot_four<kEightBit, 0>(lo, w[0], first);
  hi = dot_four<kEightBit, 0>(hi, w[4], second);
  lo = dot_four<kEightBit, 1>(lo, w[1], first);
  hi = dot_four<kEightBit, 1>(hi, w[5], second);
  lo = dot_four<kEightBit, 2>(lo, w[2], first);
  hi = dot_four<kEightBit, 2>(hi, w[6], second);
  lo = dot_four<kEightBit, 3>(lo, w[3], first);
  hi = dot_four<kEightBit, 3>(hi, w[7], second);
}
inline Ints add(const Ints& a, const Ints& b) {
  return quarters([](int32x4_t v, int32x4_t w) { return vaddq_s32(v, w); }, a, b);
}
inline int32_t sum_of(const Ints& a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
// Returns the lowest byte of each number.
inline int8x16_t lowest_bytes(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  const auto even = [](int32x4_t v, int32x4_t w) {
    return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(v), vreinterpretq_s16_s32(w)));
  };
  return vuzp1q_s8(even(a, b), even(c, d));
}
inline void store_int8(int8_t* p, const Ints& a) { vst1q_s8(p, lowest_bytes(a.v[0], a.v[1], a.v[2], a.v[3])); }
// Stores 16 columns of a tile's rows as [4 quads][kTokenTile][4] codes, all within int8.
inline void store_quads(int8_t* p, const Ints (&rows)[kTokenTile]) {
  for (int i = 0; i < 4; ++i)
    vst1q_s8(p + 16 * i, lowest_bytes(rows[0].v[i], rows[1].v[i], rows[2].v[i], rows[3].v[i]));
}
inline void store_uint8(uint8_t* p, const Ints& a) { store_int8(reinterpret_cast<int8_t*>(p), a); }

inline Floats zero_floats() { return same(vdupq_n_f32(0.0f)); }
inline Floats broadcast(float a) { return same(vdupq_n_f32(a)); }
inline Floats load_floats(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store_floats(float* p, const Floats& a) {
  vst1q_f32(p, a.v[0]);
  vst1q_f32(p + 4, a.v[1]);
  vst1q_f32(p + 8, a.v[2]);
  vst1q_f32(p + 12, a.v[3]);
}
// Converts 16 float16 numbers, eight per register.
inline Floats from_halves(uint16x8_t low, uint16x8_t high) {
  const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
  return {vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)};
}
inline Floats load_half(const uint8_t* p) {
  return from_halves(vreinterpretq_u16_u8(vld1q_u8(p)), vreinterpretq_u16_u8(vld1q_u8(p + 16)));
}
inline Floats load_bfloat16(const uint16_t* p) {
  const uint16x8_t a = vld1q_u16(p), b = vld1q_u16(p + 8), zero = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(zero, a)), vreinterpretq_f32_u16(vzip2q_u16(zero, a)),
          vreinterpretq_f32_u16(vzip1q_u16(zero, b)), vreinterpretq_f32_u16(vzip2q_u16(zero, b))};
}
inline void store_bfloat16(uint16_t* p, const Floats& a) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto rounded = [](float32x4_t v, float32x4_t w) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v), w));
  };
#else
  const auto nearest = [](float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(v, v), sum, vorrq_u32(bits, vdupq_n_u32(0x400000))));
  };
  const auto rounded = [&](float32x4_t v, float32x4_t w) { return vuzp2q_u16(nearest(v), nearest(w)); };
#endif
  vst1q_u16(p, rounded(a.v[0], a.v[1]));
  vst1q_u16(p + 8, rounded(a.v[2], a.v[3]));
}
inline void store_half(uint16_t* p, const Floats& a) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[0]), a.v[1])));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[2]), a.v[3])));
}
inline Floats load_even_bfloat16(const uint8_t* p) {
  return quarters([](uint8x16_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(v), 16)); },
                  load_bytes(p));
}
inline Floats load_odd_bfloat16(const uint8_t* p) {
  const uint32x4_t upper = vdupq_n_u32(0xffff0000);
  return quarters([upper](uint8x16_t v) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(v), upper)); },
                  load_bytes(p));
}
inline Floats to_floats(uint8x16_t bytes) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
}
inline Floats load_uint8(const uint8_t* p) { return to_floats(vld1q_u8(p)); }
// Loads 16 lower or upper halves of bytes.
template <bool kUpper>
inline Floats load_nibbles(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  return to_floats(kUpper ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}
inline Floats load_int8(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
inline Floats to_floats(const Ints& a) {
  return quarters([](int32x4_t v) { return vcvtq_f32_s32(v); }, a);
}
inline Ints to_nearest(const Floats& a) {
  return quarters([](float32x4_t v) { return vcvtnq_s32_f32(v); }, a);
}
inline Floats add(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vaddq_f32(v, w); }, a, b);
}
inline Floats sub(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vsubq_f32(v, w); }, a, b);
}
inline Floats mul(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vmulq_f32(v, w); }, a, b);
}
inline Floats div(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vdivq_f32(v, w); }, a, b);
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return quarters([](float32x4_t v, float32x4_t w, float32x4_t sum) { return vfmaq_f32(sum, v, w); }, a, b, c);
}
// Compare and select, as on other ISA levels: NEON's min instruction orders -0 below 0 and propagates NaN from either
// operand.
inline Floats minimum(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vbslq_f32(vcltq_f32(v, w), v, w); }, a, b);
}
inline Floats maximum(const Floats& a, const Floats& b) {
  return quarters([](float32x4_t v, float32x4_t w) { return vbslq_f32(vcgtq_f32(v, w), v, w); }, a, b);
}
inline float sum_of(const Floats& a) {
  const float32x4_t b = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
  return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}
inline float max_of(const Floats& a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
inline Ints max_magnitude(const Ints& so_far, const Floats& a) {
  return quarters([](int32x4_t most, float32x4_t v) { return vmaxq_s32(most, vreinterpretq_s32_f32(vabsq_f32(v))); },
                  so_far, a);
}
inline int32_t max_of(const Ints& a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
// n is within [-126, 127] and is added to the exponent bits.
inline Floats scale_by_power(const Floats& p, const Floats& n) {
  const auto power = [](float32x4_t v, float32x4_t w) {
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(w), vdupq_n_s32(127)), 23);
    return vmulq_f32(v, vreinterpretq_f32_s32(exponent));
  };
  return quarters(power, p, n);
}
inline Floats round_to_4_bits(const Floats& a) {
  const auto rounded = [](float32x4_t v) {
    const uint32x4_t bits = vaddq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x80000));
    return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xfff00000)));
  };
  return quarters(rounded, a);
}
inline Floats floor_of(const Floats& a) {
  return quarters([](float32x4_t v) { return vrndmq_f32(v); }, a);
}
// fraction is a - floor(a); scale_by_floor is p * 2^floor(a).
inline Floats fraction(const Floats& a) { return sub(a, floor_of(a)); }
inline Floats scale_by_floor(const Floats& p, const Floats& a) { return scale_by_power(p, floor_of(a)); }
inline Floats round_to_integral(const Floats& a) {
  return quarters([](float32x4_t v) { return vrndnq_f32(v); }, a);
}

inline Floats choose_greater(const Floats& a, const Floats& b, const Floats& yes, const Floats& no) {
  const auto choose = [](float32x4_t v, float32x4_t w, float32x4_t y, float32x4_t n) {
    return vbslq_f32(vcgtq_f32(v, w), y, n);
  };
  return quarters(choose, a, b, yes, no);
}
inline Floats zero_unless_above(const Floats& x, float limit, const Floats& value) {
  const float32x4_t bound = vdupq_n_f32(limit);
  const auto choose = [bound](float32x4_t v, float32x4_t w) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(w), vcleq_f32(v, bound)));
  };
  return quarters(choose, x, value);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using Pairs = Quarters<bfloat16x8_t>;  // 16 pairs of bfloat16

inline Pairs load_pairs(const uint32_t* p) {
  const Bytes bytes = load_bytes(reinterpret_cast<const uint8_t*>(p));
  return quarters([](uint8x16_t v) { return vreinterpretq_bf16_u8(v); }, bytes);
}
inline Pairs broadcast_pair(uint32_t a) { return same(vreinterpretq_bf16_u32(vdupq_n_u32(a))); }
// sum + a.first * b.first + a.second * b.second; subnormal numbers count as zero, and sums of two round to odd.
inline Floats dot_pairs(const Pairs& a, const Pairs& b, const Floats& sum) {
  return quarters([](bfloat16x8_t v, bfloat16x8_t w, float32x4_t s) { return vbfdotq_f32(s, v, w); }, a, b, sum);
}
inline void store_pairs(uint16_t* p, const Floats& a) { store_bfloat16(p, a); }
#endif

// Loads 16 f8e4m3 values times 1 / 256: sign, exponent and mantissa move to the same places of a float16.
inline Floats load_float8(const uint8_t* p) {
  const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(p));
  const auto half = [](int16x8_t wide) { return vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff)); };
  return from_halves(half(vshll_n_s8(vget_low_s8(codes), 7)), half(vshll_high_n_s8(codes, 7)));
}
template <int kStride>
inline Floats butterfly(const Floats& a) {
  static_assert(kStride == 1 || kStride == 2 || kStride == 4 || kStride == 8);
  if constexpr (kStride >= 4) {
    constexpr int kNext = kStride / 4;
    Floats out;
    for (int i = 0; i < 4; ++i)
      out.v[i] = (i & kNext) == 0 ? vaddq_f32(a.v[i], a.v[i + kNext]) : vsubq_f32(a.v[i - kNext], a.v[i]);
    return out;
  } else {
    // As on AVX-512, an FMA rounds once, like an addition or subtraction.
    alignas(16) constexpr float kSigns[2][4] = {{1.0f, -1.0f, 1.0f, -1.0f}, {1.0f, 1.0f, -1.0f, -1.0f}};
    const float32x4_t signs = vld1q_f32(kSigns[kStride - 1]);
    const auto pairs = [signs](float32x4_t v) {
      return vfmaq_f32(kStride == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2), v, signs);
    };
    return quarters(pairs, a);
  }
}
inline void transpose4(float32x4_t (&rows)[4]) {
  const auto doubles = [](float32x4_t a) { return vreinterpretq_f64_f32(a); };
  const float64x2_t a = doubles(vtrn1q_f32(rows[0], rows[1])), b = doubles(vtrn2q_f32(rows[0], rows[1]));
  const float64x2_t c = doubles(vtrn1q_f32(rows[2], rows[3])), d = doubles(vtrn2q_f32(rows[2], rows[3]));
  rows[0] = vreinterpretq_f32_f64(vzip1q_f64(a, c));
  rows[1] = vreinterpretq_f32_f64(vzip1q_f64(b, d));
  rows[2] = vreinterpretq_f32_f64(vzip2q_f64(a, c));
  rows[3] = vreinterpretq_f32_f64(vzip2q_f64(b, d));
}
inline void transpose(Floats rows[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j <= i; ++j) {
      float32x4_t below[4], above[4];
      for (int k = 0; k < 4; ++k) below[k] = rows[4 * i + k].v[j], above[k] = rows[4 * j + k].v[i];
      transpose4(below);
      transpose4(above);
      for (int k = 0; k < 4; ++k) rows[4 * j + k].v[i] = below[k], rows[4 * i + k].v[j] = above[k];
    }
  }
}

// sums_of returns the sum of each of 16 vectors.
constexpr int kSumLanes = 16;
inline void store_lanes(float* p, Floats a) { store_floats(p, a); }
inline Floats sums_of(const float (*vectors)[kSumLanes]) {
  const auto quarter = [](const float* p) {
    const Floats a = load_floats(p);
    return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  };
  const auto two = [quarter](const float* p, const float* q) {
    const float32x4_t a = quarter(p), b = quarter(q);
    return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
  };
  Floats sums;
  for (int i = 0; i < 4; ++i, vectors += 4)
    sums.v[i] = vpaddq_f32(two(vectors[0], vectors[1]), two(vectors[2], vectors[3]));
  return sums;
}

}  // namespace
}  // namespace paged
