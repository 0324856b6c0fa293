// The byte_split kernels (byte_split.h) for AVX512-VNNI. Codes are unsigned bytes. One instruction sums four products.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/kernels/byte_split.h"
#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512vnni")

#include "csrc/cpu/kernels/byte_split_kernel.h"
#include "csrc/cpu/x86/vec_avx512.h"

namespace marlin::cpu {

namespace {

// A distinct type, so that no template instance in this file shares a symbol with code for plain AVX-512.
template <int bytes>
struct Avx512Vnni : Avx512 {
  static constexpr int kBytes = bytes;
  using Bytes = __m512i;
  using Sums = __m512i;
  static constexpr int kE2M1Offset = 12;
  static constexpr int kOperandsPerLoad = 1;
  template <Codes codes>
  static constexpr bool kNearRow = kBytes == 3 && (codes == Codes::integer || codes == Codes::e2m1);

  static Sums set_sums(int32_t v) { return _mm512_set1_epi32(v); }
  static Bytes load_table(const int8_t* p) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
  template <int odd>
  static Bytes nibbles(I words) {
    return _mm512_and_si512(odd ? _mm512_srli_epi32(words, 4) : words, _mm512_set1_epi8(15));
  }
  // The instruction is written in assembly, because GCC 12 spills half of the 24 accumulators if the code uses the
  // intrinsic. With the intrinsic, four rows took 1.4 times as long.
  [[gnu::always_inline]] static void add_dots(Sums& sum, Bytes codes, __m512i activations) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
  }

  template <Codes codes, int R, int C>
  [[gnu::always_inline]] static void add_products(const CodeBytes<Avx512Vnni, codes>& code_bytes,
                                                  SplitOperands<Avx512Vnni, codes, R>& next, int begin, int end,
                                                  SplitSums<Avx512Vnni, R, C>& sums) {
    using V = Avx512Vnni;
    for (int k = begin; k < end; k += 8, next.advance()) {
      unroll<V, 2>([&](auto odd) __attribute__((always_inline)) {
        Bytes code[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          constexpr int kRow = odd * (words_per_block(codes) - 1);
          const int64_t at = kRow * next.ld_words + c * V::width;
          code[c] = code_bytes.template decode<odd>(V::load_words(next.words + at), next.high, k, c * V::width);
          if constexpr (odd == kRow) __builtin_prefetch(next.ahead + at, 0, R == 1 && kNearRow<codes> ? 3 : 2);
        });
        unroll<V, kBytes * R>([&](auto i) __attribute__((always_inline)) {
          const __m512i activation = _mm512_set1_epi32(next.x[odd * kBytes * R + i]);
          unroll<V, C>([&](auto c) __attribute__((always_inline)) { add_dots(sums[i * C + c], code[c], activation); });
        });
      });
    }
  }
};

// Converts 16 values to bytes. For codes of 4 bits, puts the even k of each run of 8 k before the odd k, as the
// operands require.
[[gnu::always_inline]] inline __m128i in_halves(__m512i values, bool byte_codes) {
  const __m128i bytes = _mm512_cvtepi32_epi8(values);
  if (byte_codes) return bytes;
  return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

// Computes the same result as pack_split, 16 activations at a time.
template <class V>
bool pack_rows(const PackRow& p) {
  constexpr int kBytes = V::kBytes;
  auto* header = static_cast<int32_t*>(p.out) + p.row;
  int32_t* to = static_cast<int32_t*>(p.out) + kMaxGroups * kHeader<kBytes> * p.rows + p.row;
  for (int begin = 0, end; begin < p.count; begin = end, header += kHeader<kBytes> * p.rows) {
    end = unit_end<V>(p, begin);
    const auto mask = [&](int k) { return static_cast<__mmask16>(end - k >= 16 ? 0xFFFF : 0xFF); };
    __m512i largest = _mm512_setzero_si512();
    for (int k = begin; k < end; k += 16) {
      const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask(k), p.values + k));
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    }
    float unit, scale;
    if (!find_unit<V>(_mm512_reduce_max_epu32(largest), unit, scale)) return false;
    const __m512 units = _mm512_set1_ps(scale), whole = _mm512_set1_ps(kWhole);
    __m512i sums[kBytes] = {};
    for (int k = begin; k < end; k += 16) {
      const __m512 scaled = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask(k), p.values + k), units, whole);
      __m512i rest = _mm512_sub_epi32(_mm512_castps_si512(scaled), _mm512_castps_si512(whole));
      if constexpr (kBytes == 1)
        _mm512_mask_storeu_ps(p.values + k, mask(k), _mm512_mul_ps(_mm512_cvtepi32_ps(rest), _mm512_set1_ps(unit)));
      alignas(16) int32_t dots[kBytes][4];
      for (int byte = kBytes - 1; byte >= 0; --byte) {
        const __m512i low = byte == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
        sums[byte] = _mm512_add_epi32(sums[byte], low);
        _mm_store_si128(reinterpret_cast<__m128i*>(dots[byte]), in_halves(low, p.byte_codes));
      }
      for (int eight = 0; eight < (end - k >= 16 ? 2 : 1); ++eight) {
        for (int odd = 0; odd < 2; ++odd) {
          for (int byte = 0; byte < kBytes; ++byte, to += p.rows)
            *to = dots[byte][2 * eight + odd];
        }
      }
    }
    header[0] = std::bit_cast<int32_t>(unit);
    for (int byte = 0; byte < kBytes; ++byte)
      header[(1 + byte) * p.rows] = _mm512_reduce_add_epi32(sums[byte]);
  }
  return true;
}

template <int bytes, int max_rows, int C>
constexpr MatrixKernel kKernel =
    split_kernel<Avx512Vnni<bytes>, max_rows, C, true, true>(&pack_rows<Avx512Vnni<bytes>>);

constexpr ByteSplitKernels kKernels{kKernel<3, 2, 4>, kKernel<3, 4, 2>, kKernel<1, 4, 4>, kKernel<1, 8, 2>};

}  // namespace

const ByteSplitKernels* byte_split_kernels() {
  return &kKernels;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
