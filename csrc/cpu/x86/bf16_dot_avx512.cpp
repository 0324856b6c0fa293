// AVX512-BF16 dot products with exact codes: vdpbf16ps multiplies pairs of bf16 and adds in fp32. A code is exact in
// bf16 (integers below 256, E2M1), a bf16 activation is one part, an fp32 activation three (24 bits = 3 * 8). The
// instruction flushes subnormals, so activations outside 2^-96 .. 2^120 are left to the fp32 kernels.
#include "kernel_set.h"

#if defined(__x86_64__)

#include "target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512bf16")

#include "bf16_parts.h"
#include "gemm_kernel.h"
#include "vec_avx512.h"

namespace marlin::cpu {

namespace {

// The same vectors under a name of their own: nothing here may share a symbol with code for plain AVX-512.
struct Avx512Bf16 : Avx512 {};

using V = Avx512Bf16;

// x is [k/8, pair, part, R]: pair j holds the activations of k = j and j + 4 in one 32-bit number.
template <int parts, int R, int C>
void dot_step(const Step& s) {
  // Every part has a sum of its own: one row alone would be a chain of dependent instructions.
  constexpr int sums = parts * R * C;
  const __m512i table = bf16_table(_mm512_loadu_si512(s.values));
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* x = static_cast<const int32_t*>(s.x);
  ChunkSum<V, R, C> sum(s);
  for (int begin = 0, segment = 0; begin < s.k; begin += s.segment, ++segment) {
    const int end = begin + s.segment < s.k ? begin + s.segment : s.k;
    __m512 acc[sums];
    unroll<V, sums>([&](auto i) __attribute__((always_inline)) { acc[i] = _mm512_setzero_ps(); });
    for (int k = begin; k < end; k += 8) {
      __m512i word[C];
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        word[c] = V::load_words(words + c * V::width);
        __builtin_prefetch(ahead + c * V::width, 0, 2);
      });
      unroll<V, 4>([&](auto j) __attribute__((always_inline)) {
        __m512i code[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          code[c] = _mm512_permutexvar_epi16(j == 0 ? word[c] : _mm512_srli_epi32(word[c], 4 * j), table);
        });
        unroll<V, parts * R>([&](auto i) __attribute__((always_inline)) {
          const __m512i activation = _mm512_set1_epi32(x[j * parts * R + i]);
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            __m512& a = acc[i * C + c];
            a = _mm512_dpbf16_ps(a, (__m512bh)code[c], (__m512bh)activation);
          });
        });
      });
      words += s.ld_words;
      ahead += s.ld_words;
      x += 4 * parts * R;
    }
    if constexpr (parts == 3) {
      __m512 total[R * C];
      unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
        total[i] = _mm512_add_ps(acc[i], _mm512_add_ps(acc[R * C + i], acc[2 * R * C + i]));
      });
      add_segment<V, R, C>(s, segment, total, sum.target());
    } else {
      add_segment<V, R, C>(s, segment, acc, sum.target());
    }
  }
  sum.finish();
}

template <int parts>
bool pack_pairs(const PackRow& p) {
  alignas(64) uint16_t bits[parts][kChunk];
  const bool good = split_bf16<parts>(p.values, p.count, bits);
  auto* to = static_cast<uint32_t*>(p.out) + p.row;
  for (int k = 0; k < p.count; k += 8) {
    for (int j = k; j < k + 4; ++j) {
      for (int part = 0; part < parts; ++part, to += p.rows) {
        *to = bits[part][j] | uint32_t{bits[part][j + 4]} << 16;
      }
    }
  }
  return good;
}

template <int parts, int min_rows, int max_rows, int C>
constexpr MatrixKernel dot_kernel() {
  MatrixKernel kernel{};
  kernel.strip = C * V::width;
  kernel.min_rows = min_rows;
  kernel.max_rows = max_rows;
  kernel.row_unit = 1;
  kernel.row_bytes = 2 * parts * kChunk;
  kernel.pack = &pack_pairs<parts>;
  for (auto& steps : kernel.step) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
      ((steps[static_cast<size_t>(min_rows + i)] = &dot_step<parts, min_rows + i, C>), ...);
    }(std::make_integer_sequence<int, max_rows - min_rows + 1>{});
  }
  return kernel;
}

constexpr Bf16DotKernels kDot{dot_kernel<3, 1, 1, V::few_rows_vectors>(),
                              dot_kernel<1, 1, V::few_rows, V::few_rows_vectors>(),
                              dot_kernel<1, V::few_rows, V::many_rows, V::many_rows_vectors>()};

}  // namespace

const Bf16DotKernels* bf16_dot_kernels() {
  return &kDot;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#elif !defined(__aarch64__)

namespace marlin::cpu {
const Bf16DotKernels* bf16_dot_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
