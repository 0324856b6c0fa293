// The byte_split kernels (byte_split.h) for AVX2. Codes are unsigned bytes. One instruction sums two products in 16
// bits. These sums are added to 32-bit sums before they can overflow.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/kernels/byte_split.h"
#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "csrc/cpu/kernels/byte_split_kernel.h"
#include "csrc/cpu/x86/vec_avx2.h"

namespace marlin::cpu {

namespace {

// A distinct type, so that no template instance in this file shares a symbol with the fp32 kernels.
template <int bytes>
struct Avx2Bytes : Avx2 {
  static constexpr int kBytes = bytes;
  using Bytes = __m256i;
  using Sums = __m256i;
  static constexpr int kE2M1Offset = 12;
  static constexpr int kOperandsPerLoad = 1;
  template <Codes codes>
  static constexpr bool kNearRow = kBytes == 3;
  // The number of packed rows whose products can be summed in 16 bits. A row adds four products of at most 24 * 128
  // (E2M1), 63 * 128 (integers in two planes) or 15 * 128 (other integers).
  template <Codes codes>
  static constexpr int kRowsIn16Bits = codes == Codes::planes ? 1
                                       : codes == Codes::e2m1 ? 2
                                                              : 4;

  static Sums set_sums(int32_t v) { return _mm256_set1_epi32(v); }
  static Bytes load_table(const int8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
  template <int odd>
  static Bytes nibbles(I words) {
    return _mm256_and_si256(odd ? _mm256_srli_epi32(words, 4) : words, _mm256_set1_epi8(15));
  }

  template <Codes codes, int R, int C>
  [[gnu::always_inline]] static void add_products(const CodeBytes<Avx2Bytes, codes>& code_bytes,
                                                  SplitOperands<Avx2Bytes, codes, R>& next, int begin, int end,
                                                  SplitSums<Avx2Bytes, R, C>& sums) {
    using V = Avx2Bytes;
    if constexpr (codes == Codes::byte) return add_byte_products<R, C>(next, begin, end, sums);
    for (int k = begin; k < end;) {
      __m256i pairs[kBytes * R * C];
      unroll<V, kBytes * R * C>([&](auto i) __attribute__((always_inline)) { pairs[i] = _mm256_setzero_si256(); });
      const int last = k + 8 * kRowsIn16Bits<codes> < end ? k + 8 * kRowsIn16Bits<codes> : end;
      for (; k < last; k += 8, next.advance()) {
        if constexpr (R == 1 && kNearRow<codes>) {
          __builtin_prefetch(next.ahead);
          __builtin_prefetch(next.ahead + 16);
        } else {
          __builtin_prefetch(next.ahead, 0, 2);
        }
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          const __m256i word = V::load_words(next.words + c * V::width);
          const __m256i even = code_bytes.template decode<0>(word, next.high, k, c * V::width);
          const __m256i odd = code_bytes.template decode<1>(word, next.high, k, c * V::width);
          unroll<V, kBytes * R>([&](auto i) __attribute__((always_inline)) {
            const __m256i even_x = _mm256_set1_epi32(next.x[i]), odd_x = _mm256_set1_epi32(next.x[kBytes * R + i]);
            const __m256i product =
                _mm256_add_epi16(_mm256_maddubs_epi16(even, even_x), _mm256_maddubs_epi16(odd, odd_x));
            pairs[i * C + c] = _mm256_add_epi16(pairs[i * C + c], product);
          });
        });
      }
      unroll<V, kBytes * R * C>([&](auto i) __attribute__((always_inline)) {
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1)));
      });
    }
  }

  // Adds the products of 8-bit codes and single-byte activations. The lower four bits and the upper four bits of a code
  // have separate sums, because the products of 32 k with four bits fit in 16 bits: each sum has 16 products of at most
  // 15 * 127.
  template <int R, int C>
  [[gnu::always_inline]] static void add_byte_products(SplitOperands<Avx2Bytes, Codes::byte, R>& next, int begin,
                                                       int end, SplitSums<Avx2Bytes, R, C>& sums) {
    using V = Avx2Bytes;
    static_assert(kBytes == 1 && kUnitGroup<kBytes> == 32);
    __m256i lower[R * C], upper[R * C];
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { lower[i] = upper[i] = _mm256_setzero_si256(); });
    for (int k = begin; k < end; k += 8, next.advance()) {
      unroll<V, 2>([&](auto half) __attribute__((always_inline)) {
        __builtin_prefetch(next.ahead + half * next.ld_words, 0, 2);
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          const __m256i word = V::load_words(next.words + half * next.ld_words + c * V::width);
          const __m256i low = nibbles<0>(word), high = nibbles<1>(word);
          unroll<V, R>([&](auto i) __attribute__((always_inline)) {
            const __m256i x = _mm256_set1_epi32(next.x[half * R + i]);
            lower[i * C + c] = _mm256_add_epi16(lower[i * C + c], _mm256_maddubs_epi16(low, x));
            upper[i * C + c] = _mm256_add_epi16(upper[i * C + c], _mm256_maddubs_epi16(high, x));
          });
        });
      });
    }
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      const __m256i low = _mm256_madd_epi16(lower[i], _mm256_set1_epi16(1));
      const __m256i high = _mm256_madd_epi16(upper[i], _mm256_set1_epi16(16));
      sums[i] = _mm256_add_epi32(sums[i], _mm256_add_epi32(low, high));
    });
  }
};

template <int bytes, int max_rows, int C>
constexpr MatrixKernel kKernel =
    split_kernel<Avx2Bytes<bytes>, max_rows, C, bytes == 1, true>(&pack_split<Avx2Bytes<bytes>>);

constexpr ByteSplitKernels kKernels{kKernel<3, 1, 4>, {}, kKernel<1, 1, 4>, kKernel<1, 4, 2>};

}  // namespace

const ByteSplitKernels* avx2_byte_split_kernels() {
  return &kKernels;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
