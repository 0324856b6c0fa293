// The vector policy for AVX2 with FMA and F16C: vectors of 8 columns. vec_portable.h describes the functions. vpermps
// reads three index bits, so a look-up in 16 entries needs two vpermps.
#pragma once

#include <immintrin.h>

#include "csrc/cpu/formats.h"
#include "csrc/cpu/kernels/integer_codes.h"

namespace marlin::cpu {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int width = 8;
  static constexpr int small_m_rows = 2;
  static constexpr int small_m_vectors = 4;
  static constexpr int large_m_rows = 6;
  static constexpr int large_m_vectors = 2;
  static constexpr bool large_m_from_panel = true;
  template <Codes codes>
  static constexpr Codes decoder_for = codes;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F pow2(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F zero_below(F x, float limit, F value) {
    return _mm256_and_ps(value, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ));
  }
  static F rounded(F a) {
    asm("" : "+x"(a));
    return a;
  }
  static I load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_words(uint32_t* p, I words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words); }
  template <int j>
  static I insert_code(I word, I from, int shift) {
    const I code = _mm256_and_si256(_mm256_srl_epi32(from, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
    return _mm256_or_si256(word, _mm256_slli_epi32(code, 4 * j));
  }
  template <int shift, int bits>
  static I field(I words) {
    const I shifted = shift == 0 ? words : _mm256_srli_epi32(words, shift);
    return shift + bits == 32 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi32((1 << bits) - 1));
  }
  static F to_float(I whole) { return _mm256_cvtepi32_ps(whole); }
  static F load_bytes(const uint8_t* p, bool is_signed) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  }
  static F load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_half(uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static I bfloat16_bits(F v) {
    const I bits = _mm256_castps_si256(v);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  }
  static void store_bfloat16(uint16_t* p, F a, F b) {
    // vpackusdw packs each 128-bit half separately, so the result must be reordered.
    const I packed = _mm256_packus_epi32(bfloat16_bits(a), bfloat16_bits(b));
    _mm256_storeu_si256(reinterpret_cast<I*>(p), _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
  static void stream_line(void* to, const void* from) {
    const auto* in = static_cast<const I*>(from);
    _mm256_stream_si256(static_cast<I*>(to), _mm256_loadu_si256(in));
    _mm256_stream_si256(static_cast<I*>(to) + 1, _mm256_loadu_si256(in + 1));
  }

  struct E4M3Pairs;
  template <Codes codes>
  struct Decoder {
    __m256 low;
    __m256 high;
    explicit Decoder(const float* values) : low(_mm256_loadu_ps(values)), high(_mm256_loadu_ps(values + 8)) {}
    template <int j>
    F decode(I words) const {
      const I shifted = j == 0 ? words : _mm256_srli_epi32(words, 4 * j);
      const I sign_first = j == 7 ? words : _mm256_slli_epi32(words, 28 - 4 * j);  // bit 31 is bit 3 of the code
      const F below = _mm256_permutevar8x32_ps(low, shifted);
      if constexpr (codes == Codes::e2m1) {
        return _mm256_xor_ps(below, _mm256_and_ps(_mm256_castsi256_ps(sign_first), _mm256_set1_ps(-0.F)));
      }
      return _mm256_blendv_ps(below, _mm256_permutevar8x32_ps(high, shifted), _mm256_castsi256_ps(sign_first));
    }
  };
};

template <>
struct Avx2::Decoder<Codes::integer> : IntegerCodes<Avx2, 4> {
  using IntegerCodes::IntegerCodes;
};

template <>
struct Avx2::Decoder<Codes::byte> : IntegerCodes<Avx2, 8> {
  using IntegerCodes::IntegerCodes;
};

// Converts the E4M3 codes in the odd or the even bytes of words to fp16. The results are the codes' values divided by
// `unit`. NaN codes become 480.
struct Avx2::E4M3Pairs {
  static constexpr float unit = 256.F;
  static I odd(I word) {
    return _mm256_and_si256(_mm256_srai_epi16(word, 1), _mm256_set1_epi16(static_cast<short>(0xBF80)));
  }
  static I even(I word) { return odd(_mm256_slli_epi16(word, 8)); }
  static I larger_magnitudes(I largest, I word) {
    return _mm256_max_epu8(largest, _mm256_and_si256(word, _mm256_set1_epi8(0x7F)));
  }
  static F nan_where_largest(I largest, F sum) {
    const I no_nan = _mm256_cmpeq_epi32(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7F)), _mm256_setzero_si256());
    return _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), sum, _mm256_castsi256_ps(no_nan));
  }
  // The even lanes get x[first], the odd lanes x[first + 2].
  template <int first>
  static F activations(const float* x) {
    return _mm256_permute_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(x)), first == 0 ? 0x88 : 0xDD);
  }
  static F columns(F lower, F upper) {
    const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(lower, upper));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

// Converts E4M3 codes through fp16, as decode_scales does. After inlining, the compiler converts the 32 codes to fp16
// once for the four calls of decode(). In a NaN all bits of the magnitude are set, so the addition of 1 to the
// magnitude carries into bit 14, the upper bit of fp16's exponent.
template <>
struct Avx2::Decoder<Codes::e4m3> {
  static constexpr float unit = E4M3Pairs::unit;
  explicit Decoder(const float*) {}
  static I halves(I codes) {
    const I magnitudes_and_signs = E4M3Pairs::odd(codes);
    const I carry = _mm256_add_epi16(magnitudes_and_signs, _mm256_set1_epi16(0x80));
    return _mm256_or_si256(magnitudes_and_signs, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
  }
  template <int j>
  F decode(I words) const {
    const __m128i first_bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I fours = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(first_bytes));
    const I codes = _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const I zero = _mm256_setzero_si256();
    const I two = halves(j % 2 == 0 ? _mm256_unpacklo_epi8(zero, codes) : _mm256_unpackhi_epi8(zero, codes));
    return _mm256_cvtph_ps(j < 2 ? _mm256_castsi256_si128(two) : _mm256_extracti128_si256(two, 1));
  }
};

}  // namespace marlin::cpu
