// The byte_split kernel (byte_split.h) for CPUs with FEAT_I8MM. One instruction multiplies eight k of two rows with
// eight k of two columns. These are 32 products, twice as many as in a byte dot product. byte_split turns each row of
// activations into three rows of bytes.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET("i8mm")

#include "csrc/cpu/arm/neon_bytes.h"

namespace marlin::cpu {

namespace {

struct Matrix;

struct NeonMatrix : NeonBytes<Matrix, 3> {
  // Joins the low or the high halves of two vectors. This converts vectors of four columns to blocks of two rows and
  // two columns, and back.
  [[gnu::always_inline]] static Sums low_halves(Sums a, Sums b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
  [[gnu::always_inline]] static Sums high_halves(Sums a, Sums b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }

  // If the number of byte rows is odd, the last pair has a second row of undefined bytes, whose sums are not used.
  template <Codes codes, int R, int C>
  [[gnu::always_inline]] static void add_products(const CodeBytes<NeonMatrix, codes>& bytes,
                                                  SplitOperands<NeonMatrix, codes, R>& next, int begin, int end,
                                                  SplitSums<NeonMatrix, R, C>& sums) {
    using V = NeonMatrix;
    constexpr int kRows = kBytes * R, kPairs = (kRows + 1) / 2;
    Sums acc[2 * kPairs * C];
    unroll<V, kPairs * C>([&](auto i) __attribute__((always_inline)) {
      constexpr int kFirst = i / C * 2 * C + i % C, kSecond = i / C * 2 + 1 < kRows ? kFirst + C : kFirst;
      acc[2 * i] = low_halves(sums[kFirst], sums[kSecond]);
      acc[2 * i + 1] = high_halves(sums[kFirst], sums[kSecond]);
    });
    for (int k = begin; k < end; k += 8, next.advance()) {
      for (int i = 0; i < C * V::width; i += 16)
        __builtin_prefetch(next.ahead + i, 0, 2);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        const I words = V::load_words(next.words + c * V::width);
        const int32x4_t even = vreinterpretq_s32_s8(bytes.template decode<0>(words));
        const int32x4_t odd = vreinterpretq_s32_s8(bytes.template decode<1>(words));
        const Bytes low = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
        const Bytes high = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
        unroll<V, kPairs>([&](auto pair) __attribute__((always_inline)) {
          const Bytes two = vreinterpretq_s8_s32(vld1q_s32(next.x + 4 * pair));
          Sums* to = acc + 2 * (pair * C + c);
          to[0] = vmmlaq_s32(to[0], two, low);
          to[1] = vmmlaq_s32(to[1], two, high);
        });
      });
    }
    unroll<V, kRows * C>([&](auto i) __attribute__((always_inline)) {
      const Sums* from = acc + 2 * (i / C / 2 * C + i % C);
      sums[i] = i / C % 2 == 0 ? low_halves(from[0], from[1]) : high_halves(from[0], from[1]);
    });
  }
};

constexpr MatrixKernel kKernel = split_kernel<NeonMatrix, 4, 2>(&pack_split<NeonMatrix, true>);

}  // namespace

const MatrixKernel* byte_matrix_kernel() {
  return &kKernel;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
