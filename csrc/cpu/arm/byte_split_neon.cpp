// Integer dot products of bytes (FEAT_DotProd): an activation becomes a whole number of 23 bits, in units of a
// power of two fixed by the largest of its segment, and that number three signed bytes (planes). Codes are small whole
// numbers, sums are exact in 32 bits, and sixteen products cost one instruction.
#include <algorithm>
#include <utility>

#include "kernel_set.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "gemm_kernel.h"
#include "planes.h"
#include "vec_neon.h"

namespace marlin::cpu {

namespace {

// The same vectors under a name of their own: nothing here may share a symbol with code for plain NEON.
struct NeonDot : Neon {};

using V = NeonDot;

// Signed bytes of the codes. A byte stands for (byte - offset) * unit.
template <Codes codes>
class Bytes {
 public:
  explicit Bytes(const float* values) : offset_(codes == Codes::e2m1 ? 0 : -static_cast<int>(values[0])) {
    if constexpr (codes == Codes::e2m1) {
      int8_t doubled[16];
      for (int q = 0; q < 16; ++q)
        doubled[q] = static_cast<int8_t>(2 * values[q]);
      table_ = vld1q_s8(doubled);
    }
  }
  int offset() const { return offset_; }
  static constexpr float unit = codes == Codes::e2m1 ? 0.5F : 1.F;
  template <int odd>
  [[gnu::always_inline]] int8x16_t decode(uint32x4_t words) const {
    const uint8x16_t bytes = vreinterpretq_u8_u32(words);
    const uint8x16_t nibbles = odd ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    if constexpr (codes == Codes::e2m1) return vqtbl1q_s8(table_, nibbles);
    return vreinterpretq_s8_u8(nibbles);
  }

 private:
  int8x16_t table_ = vdupq_n_s8(0);
  int offset_;
};

constexpr int kVector = 4;  // operands of 8 k are loaded as whole vectors

// x: [segment][kHead, R], then [k/8][even and odd, plane, R].
template <Codes codes, int R, int C>
void planes_step(const Step& s) {
  const Bytes<codes> bytes(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* head = static_cast<const int32_t*>(s.x);
  const int32_t* x = head + kMaxSegments * kHead * R;
  ChunkSum<V, R, C> sum(s);
  for (int begin = 0, segment = 0; begin < s.k; begin += s.segment, ++segment, head += kHead * R) {
    const int end = begin + s.segment < s.k ? begin + s.segment : s.k;
    int32x4_t acc[kPlanes * R * C];
    unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
      const int32x4_t start = vdupq_n_s32(-bytes.offset() * head[R + i]);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[i * C + c] = start; });
    });
    for (int k = begin; k < end; k += 8) {
      for (int i = 0; i < C * V::width; i += 16)
        __builtin_prefetch(ahead + i, 0, 2);
      unroll<V, 2>([&](auto odd) __attribute__((always_inline)) {
        int8x16_t code[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          code[c] = bytes.template decode<odd>(V::load_words(words + c * V::width));
        });
        unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
          constexpr int kDot = odd * kPlanes * R + i;
          const int8x16_t four = vreinterpretq_s8_s32(vld1q_s32(x + kDot / 4 * 4));
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            acc[i * C + c] = vdotq_laneq_s32(acc[i * C + c], code[c], four, kDot % 4);
          });
        });
      });
      words += s.ld_words;
      ahead += s.ld_words;
      x += dots_of<kVector>(R);
    }
    float32x4_t total[R * C];
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      auto plane = [&](int p) __attribute__((always_inline)) { return vcvtq_f32_s32(acc[p * R * C + i]); };
      const float32x4_t low = V::fma(plane(1), V::set1(0x1p8F), plane(2));
      const float unit = std::bit_cast<float>(head[i / C]) * Bytes<codes>::unit;
      total[i] = V::mul(V::fma(plane(0), V::set1(0x1p16F), low), V::set1(unit));
    });
    add_segment<V, R, C>(s, segment, total, sum.target());
  }
  sum.finish();
}

template <int max_rows, int C>
constexpr MatrixKernel kKernel =
    planes_kernel<max_rows>(C * V::width, planes_row_bytes<kVector>(), &pack_planes<V, kVector>,
                            []<Codes codes, int R>() { return &planes_step<codes, R, C>; });

constexpr PlanesKernels kPlanesKernels{kKernel<2, 4>, kKernel<4, 2>};

}  // namespace

const PlanesKernels* planes_kernels() {
  return &kPlanesKernels;
}

}  // namespace marlin::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
