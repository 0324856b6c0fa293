// The portable vector policy: vectors of 4 columns in plain C++, which the compiler may map to vector registers. The
// comments hold for the functions of all policies. The other policies also have field<shift, bits>(words), which
// returns `bits` bits of each word, from bit `shift` on.
#pragma once

#include <cstring>

#include "csrc/cpu/formats.h"

namespace marlin::cpu {

struct Portable {
  struct F {
    float v[4];
  };
  struct I {
    uint32_t v[4];
  };
  static constexpr int width = 4;
  static constexpr int small_m_rows = 2;
  static constexpr int small_m_vectors = 2;
  static constexpr int large_m_rows = 4;
  static constexpr int large_m_vectors = 2;
  static constexpr bool large_m_from_panel = true;
  template <Codes codes>
  static constexpr Codes decoder_for = is_byte_wide(codes) ? Codes::byte : Codes::table;

  template <class Function>
  static F map(Function f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static F zero() { return {}; }
  static F set1(float v) { return {{v, v, v, v}}; }
  static F load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store(float* p, F a) {
    for (int i = 0; i < 4; ++i)
      p[i] = a.v[i];
  }
  static F mul(F a, F b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F add(F a, F b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(F a, F b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F fma(F a, F b, F c) {
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F fnma(F a, F b, F c) {
    return map([&](int i) { return c.v[i] - a.v[i] * b.v[i]; });
  }
  static F div(F a, F b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
  }
  // Returns NaN if b is NaN.
  static F max(F a, F b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  // Returns 2^n for whole n in [-126, 127].
  static F pow2(F n) {
    return map([&](int i) {
      const bool in_range = n.v[i] >= -126.F;
      return std::bit_cast<float>(static_cast<uint32_t>(in_range ? static_cast<int32_t>(n.v[i]) + 127 : 0) << 23);
    });
  }
  // Returns value, or 0 if x < limit.
  static F zero_below(F x, float limit, F value) {
    return map([&](int i) { return x.v[i] < limit ? 0.F : value.v[i]; });
  }
  // Forces the rounding of a product. Otherwise the compiler may fuse the product with the addition that follows.
  static F rounded(F a) {
    volatile float kept[4];
    for (int i = 0; i < 4; ++i)
      kept[i] = a.v[i];
    return map([&](int i) { return kept[i]; });
  }
  static I load_words(const uint32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store_words(uint32_t* p, I words) { std::memcpy(p, words.v, sizeof words.v); }
  // Returns `word` with the four bits of `from` that begin at bit `shift` as code j. Code j of `word` must be 0.
  template <int j>
  static I insert_code(I word, I from, int shift) {
    for (int i = 0; i < 4; ++i)
      word.v[i] |= ((from.v[i] >> shift) & 15U) << (4 * j);
    return word;
  }
  static F load_bytes(const uint8_t* p, bool is_signed) {
    return map([&](int i) { return static_cast<float>(is_signed ? static_cast<int8_t>(p[i]) : int{p[i]}); });
  }
  static F load_half(const uint16_t* p) {
    return map([&](int i) { return half_to_float(p[i]); });
  }
  static void store_half(uint16_t* p, F a) {
    for (int i = 0; i < 4; ++i)
      p[i] = float_to_half(a.v[i]);
  }
  // The lower 16 bits of a NaN must be zero. Otherwise the rounding could carry into the exponent and the sign.
  static void store_bfloat16(uint16_t* p, F a, F b) {
    for (int i = 0; i < 4; ++i) {
      p[i] = float_to_bfloat16(a.v[i]);
      p[i + 4] = float_to_bfloat16(b.v[i]);
    }
  }
  static void stream_line(void* to, const void* from) { std::memcpy(to, from, 64); }

  template <Codes codes>
  struct Decoder {
    const float* values;
    explicit Decoder(const float* v) : values(v) {}
    template <int j>
    F decode(I words) const {
      constexpr uint32_t kBits = is_byte_wide(codes) ? 8 : 4;
      return map([&](int i) { return values[(words.v[i] >> (kBits * j)) & ((1U << kBits) - 1)]; });
    }
  };
};

}  // namespace marlin::cpu
