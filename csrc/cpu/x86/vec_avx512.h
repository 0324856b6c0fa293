// The vector policy for AVX-512 (F, BW, DQ, VL): vectors of 16 columns. vec_portable.h describes the functions. vpermps
// looks up 16 entries by the low four bits of each lane. So one look-up decodes any 4-bit format, and the codes need no
// mask.
#pragma once

#include <immintrin.h>

#include "csrc/cpu/formats.h"
#include "csrc/cpu/kernels/integer_codes.h"

namespace marlin::cpu {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int width = 16;
  static constexpr int small_m_rows = 4;
  static constexpr int small_m_vectors = 4;
  static constexpr int large_m_rows = 12;
  static constexpr int large_m_vectors = 2;
  static constexpr bool large_m_from_panel = false;
  template <Codes codes>
  static constexpr Codes decoder_for = is_byte_wide(codes) ? codes : Codes::table;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F pow2(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.F), n); }
  static F zero_below(F x, float limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
  }
  static F rounded(F a) {
    asm("" : "+v"(a));
    return a;
  }
  static I load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store_words(uint32_t* p, I words) { _mm512_storeu_si512(p, words); }
  template <int j>
  static I insert_code(I word, I from, int shift) {
    const I rotated = _mm512_rolv_epi32(from, _mm512_set1_epi32((4 * j - shift) & 31));
    constexpr int kAOrBAndC = 0xF8;
    return _mm512_ternarylogic_epi32(word, rotated, _mm512_set1_epi32(static_cast<int>(15U << (4 * j))), kAOrBAndC);
  }
  template <int shift, int bits>
  static I field(I words) {
    const I shifted = shift == 0 ? words : _mm512_srli_epi32(words, shift);
    return shift + bits == 32 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi32((1 << bits) - 1));
  }
  static F to_float(I whole) { return _mm512_cvtepi32_ps(whole); }
  static F load_bytes(const uint8_t* p, bool is_signed) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
  }
  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_half(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Returns v as bf16, rounded to nearest even, in the upper 16 bits of each lane.
  static I round_high_half(F v) {
    const I bits = _mm512_castps_si512(v);
    const I sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    return _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
  }
  static void store_bfloat16(uint16_t* p, F a, F b) {
    const I high_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(round_high_half(a), high_halves, round_high_half(b)));
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<I*>(to), _mm512_loadu_si512(from));
  }

  struct NormalE4M3;
  struct E4M3Pairs;
  template <Codes>
  struct Decoder {
    __m512 table;
    explicit Decoder(const float* values) : table(_mm512_loadu_ps(values)) {}
    template <int j>
    F decode(I words) const {
      return _mm512_permutexvar_ps(j == 0 ? words : _mm512_srli_epi32(words, 4 * j), table);
    }
  };
};

template <>
struct Avx512::Decoder<Codes::byte> : IntegerCodes<Avx512, 8> {
  using IntegerCodes::IntegerCodes;
};

// Converts E4M3 codes that are normal numbers to fp32. The results are the codes' values divided by `unit`. The product
// with 16, or the shift by 4, leaves the magnitude of a code in bits 4 to 10 of a 16-bit half, and its sign in bit 15.
// In an upper half, these are the fields of an fp32 whose exponent lacks 120. The mask clears the upper four bits of
// the exponent, which are then set to 112.
struct Avx512::NormalE4M3 {
  static constexpr float unit = 256.F;
  template <int j>
  static F value(I word) {
    constexpr int kAAndBOrC = 0xEA;
    const I halves = j % 2 == 0 ? _mm512_maddubs_epi16(_mm512_set1_epi16(16), word) : _mm512_srai_epi16(word, 4);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(j < 2 ? _mm512_slli_epi32(halves, 16) : halves,
                                                         _mm512_set1_epi32(static_cast<int>(0x87F00000)),
                                                         _mm512_set1_epi32(112 << 23), kAAndBOrC));
  }
  // Returns true if no code is zero, subnormal (a magnitude below 8) or NaN (0x7F). code + 1 and code - 8 differ in bit
  // 7 only if the addition or the subtraction carried out of the magnitude.
  template <size_t C>
  static bool all(const I (&words)[C]) {
    constexpr int kAOrBXorC = 0xF6;
    I carries{};
    for (const I word : words)
      carries = _mm512_ternarylogic_epi32(carries, _mm512_add_epi8(word, _mm512_set1_epi8(1)),
                                          _mm512_sub_epi8(word, _mm512_set1_epi8(8)), kAOrBXorC);
    return _mm512_movepi8_mask(carries) == 0;
  }
};

// Converts the E4M3 codes in the odd or the even bytes of words to fp16. The results are the codes' values divided by
// `unit`. NaN codes become 480.
struct Avx512::E4M3Pairs {
  static constexpr float unit = 256.F;
  static I odd(I word) {
    return _mm512_and_si512(_mm512_srai_epi16(word, 1), _mm512_set1_epi16(static_cast<short>(0xBF80)));
  }
  static I even(I word) { return odd(_mm512_slli_epi16(word, 8)); }
  static I larger_magnitudes(I largest, I word) {
    return _mm512_max_epu8(largest, _mm512_and_si512(word, _mm512_set1_epi8(0x7F)));
  }
  static F nan_where_largest(I largest, F sum) {
    const I nan = _mm512_maskz_set1_epi8(_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(0x7F)), 1);
    return _mm512_mask_mov_ps(sum, _mm512_test_epi32_mask(nan, nan), _mm512_set1_ps(__builtin_nanf("")));
  }
  // Returns x[first] and x[first + 2] in turn.
  template <int first>
  static F activations(const float* x) {
    return _mm512_permute_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(x)), first == 0 ? 0x88 : 0xDD);
  }
  static F columns(F lower, F upper) {
    const I first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I second = _mm512_or_si512(first, _mm512_set1_epi32(1));
    return add(_mm512_permutex2var_ps(lower, first, upper), _mm512_permutex2var_ps(lower, second, upper));
  }
};

// Converts 64 codes as Avx2::Decoder<Codes::e4m3> does.
template <>
struct Avx512::Decoder<Codes::e4m3> {
  static constexpr float unit = E4M3Pairs::unit;
  explicit Decoder(const float*) {}
  static I halves(I codes) {
    constexpr int kAOrBAndC = 0xF8;
    const I magnitudes_and_signs = E4M3Pairs::odd(codes);
    const I carry = _mm512_add_epi16(magnitudes_and_signs, _mm512_set1_epi16(0x80));
    return _mm512_ternarylogic_epi32(magnitudes_and_signs, carry, _mm512_set1_epi16(0x4000), kAOrBAndC);
  }
  template <int j>
  F decode(I words) const {
    const __m128i first_bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I fours = _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(first_bytes));
    // Every 128 bits then hold eight columns at two k: k = 0 and 1 in the lower half of the vector, k = 2 and 3 in the
    // upper half.
    const I codes =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15), fours);
    const I zero = _mm512_setzero_si512();
    const I two = halves(j % 2 == 0 ? _mm512_unpacklo_epi8(zero, codes) : _mm512_unpackhi_epi8(zero, codes));
    return _mm512_cvtph_ps(j < 2 ? _mm512_castsi512_si256(two) : _mm512_extracti64x4_epi64(two, 1));
  }
};

}  // namespace marlin::cpu
