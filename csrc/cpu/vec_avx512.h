// AVX-512 (F, BW, DQ, VL): 16 columns a vector; vpermps reads the low four bits of each lane, so one 16-entry table
// serves every format and needs no mask.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace marlin::cpu {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int width = 16;
  static constexpr int few_rows = 4;
  static constexpr int few_rows_vectors = 4;
  static constexpr int many_rows = 12;
  static constexpr int many_rows_vectors = 2;
  static constexpr bool many_rows_from_panel = false;
  template <Codes>
  static constexpr Codes decoder_for = Codes::table;

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
  // NaN where b is NaN.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  // 2^n for whole n in [-126, 127].
  static F pow2(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.F), n); }
  // value, but 0 where x < limit.
  static F zero_below(F x, float limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
  }
  // Compilers may fuse a product into the sum that follows; this keeps its rounding.
  static F rounded(F a) {
    asm("" : "+v"(a));
    return a;
  }
  static I load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_half(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

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

}  // namespace marlin::cpu
