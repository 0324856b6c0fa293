// The vector policy for NEON (Armv8-A): vectors of 4 columns. vec_portable.h describes the functions.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "csrc/cpu/formats.h"
#include "csrc/cpu/kernels/integer_codes.h"

namespace marlin::cpu {

struct Neon {
  using F = float32x4_t;
  using I = uint32x4_t;
  static constexpr int width = 4;
  static constexpr int small_m_rows = 4;
  static constexpr int small_m_vectors = 4;
  static constexpr int large_m_rows = 6;
  static constexpr int large_m_vectors = 4;
  static constexpr bool large_m_from_panel = true;
  template <Codes codes>
  static constexpr Codes decoder_for = codes == Codes::e2m1 ? Codes::table : codes;

  static F zero() { return vdupq_n_f32(0.F); }
  static F set1(float v) { return vdupq_n_f32(v); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F v) { vst1q_f32(p, v); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }
  static F pow2(F n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)); }
  static F zero_below(F x, float limit, F value) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, vdupq_n_f32(limit))));
  }
  static F rounded(F a) {
    asm("" : "+w"(a));
    return a;
  }
  static I load_words(const uint32_t* p) { return vld1q_u32(p); }
  static void store_words(uint32_t* p, I words) { vst1q_u32(p, words); }
  template <int j>
  static I insert_code(I word, I from, int shift) {
    const I code = vandq_u32(vshlq_u32(from, vdupq_n_s32(-shift)), vdupq_n_u32(15));
    return vsliq_n_u32(word, code, 4 * j);
  }
  template <int shift, int bits>
  static I field(I words) {
    I shifted = words;
    if constexpr (shift != 0) shifted = vshrq_n_u32(words, shift);
    return shift + bits == 32 ? shifted : vandq_u32(shifted, vdupq_n_u32((1U << bits) - 1));
  }
  static F to_float(I whole) { return vcvtq_f32_u32(whole); }
  static F load_bytes(const uint8_t* p, bool is_signed) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    if (is_signed) return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
  }
  static F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store_half(uint16_t* p, F v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  static I rounding(I bits) { return vaddq_u32(vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)), vdupq_n_u32(0x7FFF)); }
  static uint16x8_t plus_rounding(F v) {
    const I bits = vreinterpretq_u32_f32(v);
    return vreinterpretq_u16_u32(vaddq_u32(bits, rounding(bits)));
  }
  // vaddhn would add and take the upper halves in one instruction. But GCC 14.2 compiles vaddhn with 0x7FFF to raddhn,
  // which adds 0x8000, and so rounds ties up instead of to even.
  static void store_bfloat16(uint16_t* p, F a, F b) { vst1q_u16(p, vuzp2q_u16(plus_rounding(a), plus_rounding(b))); }
  static void stream_line(void* to, const void* from) { std::memcpy(to, from, 64); }

  // Looks up codes in a table of 64 bytes. Code q selects the bytes 4q to 4q + 3.
  template <Codes>
  struct Decoder {
    uint8x16x4_t table;
    explicit Decoder(const float* values) {
      for (int i = 0; i < 4; ++i)
        table.val[i] = vreinterpretq_u8_f32(vld1q_f32(values + 4 * i));
    }
    template <int j>
    F decode(I words) const {
      const I code = field<4 * j, 4>(words);
      const I index = vmlaq_u32(vdupq_n_u32(0x03020100U), code, vdupq_n_u32(0x04040404U));
      return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(index)));
    }
  };
};

template <>
struct Neon::Decoder<Codes::integer> : IntegerCodes<Neon, 4> {
  using IntegerCodes::IntegerCodes;
};

template <>
struct Neon::Decoder<Codes::byte> : IntegerCodes<Neon, 8> {
  using IntegerCodes::IntegerCodes;
};

// Moves the exponent and mantissa of a code into the fields of an fp32, whose exponent bias is 120 larger. A subnormal
// code m * 2^-9 becomes 2^-6 + m * 2^-9, and then 2^-6 is subtracted. So no operand is an fp32 subnormal, which the
// processor may flush.
template <>
struct Neon::Decoder<Codes::e4m3> {
  explicit Decoder(const float*) {}
  template <int j>
  F decode(I words) const {
    I raised, sign = words;
    if constexpr (j == 3) {
      raised = vshrq_n_u32(words, 4);
    } else {
      raised = vshlq_n_u32(words, 20 - 8 * j);
      sign = vshlq_n_u32(words, 24 - 8 * j);
    }
    const I magnitude = vandq_u32(raised, vdupq_n_u32(0x07F00000U));
    const I small = vcltq_u32(magnitude, vdupq_n_u32(0x00800000U));
    const I nan = vceqq_u32(magnitude, vdupq_n_u32(0x07F00000U));
    const I exponent = vsubq_u32(vdupq_n_u32(120U << 23), vshlq_n_u32(small, 23));
    const F implicit = vreinterpretq_f32_u32(vandq_u32(small, vreinterpretq_u32_f32(vdupq_n_f32(0x1p-6F))));
    const F finite = vsubq_f32(vreinterpretq_f32_u32(vaddq_u32(magnitude, exponent)), implicit);
    const I special = vorrq_u32(vandq_u32(sign, vdupq_n_u32(0x80000000U)), vandq_u32(nan, vdupq_n_u32(0x7FC00000U)));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(finite), special));
  }
};

}  // namespace marlin::cpu
