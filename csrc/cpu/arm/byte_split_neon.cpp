// The byte_split kernels (byte_split.h) for CPUs with FEAT_DotProd. Codes are signed bytes. One instruction computes
// sixteen products.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET("dotprod")

#include "csrc/cpu/arm/neon_bytes.h"

namespace marlin::cpu {

namespace {

struct Dot;

template <int bytes>
struct NeonDot : NeonBytes<Dot, bytes> {
  using Base = NeonBytes<Dot, bytes>;
  using Base::kBytes;
  using typename Base::Bytes;

  template <Codes codes, int R, int C>
  [[gnu::always_inline]] static void add_products(const CodeBytes<NeonDot, codes>& code_bytes,
                                                  SplitOperands<NeonDot, codes, R>& next, int begin, int end,
                                                  SplitSums<NeonDot, R, C>& sums) {
    using V = NeonDot;
    for (int k = begin; k < end; k += 8, next.advance()) {
      for (int i = 0; i < C * V::width; i += 16)
        __builtin_prefetch(next.ahead + i, 0, 2);
      unroll<V, 2>([&](auto odd) __attribute__((always_inline)) {
        Bytes code[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          code[c] = code_bytes.template decode<odd>(V::load_words(next.words + c * V::width));
        });
        unroll<V, kBytes * R>([&](auto i) __attribute__((always_inline)) {
          constexpr int kOperand = odd * kBytes * R + i;
          const int8x16_t four = vreinterpretq_s8_s32(vld1q_s32(next.x + kOperand / 4 * 4));
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            sums[i * C + c] = vdotq_laneq_s32(sums[i * C + c], code[c], four, kOperand % 4);
          });
        });
      });
    }
  }
};

template <int bytes, int max_rows, int C>
constexpr MatrixKernel kKernel = split_kernel<NeonDot<bytes>, max_rows, C>(&pack_split<NeonDot<bytes>>);

constexpr ByteSplitKernels kKernels{kKernel<3, 2, 4>, kKernel<3, 4, 2>, kKernel<1, 4, 4>, kKernel<1, 8, 2>};

}  // namespace

const ByteSplitKernels* byte_split_kernels() {
  return &kKernels;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
