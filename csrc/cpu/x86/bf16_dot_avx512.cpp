// Products with AVX512-BF16: vdpbf16ps multiplies pairs of bf16 and adds in fp32. Codes are exact in bf16 (integers
// below 256, E2M1). An fp32 activation is the sum of three bf16 terms ("parts") of 8 bits; a bf16 activation is one
// part. The instruction flushes subnormals, so activations outside 2^-96 .. 2^120 are left to the fp32 kernels.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/x86/target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512bf16")

#include "csrc/cpu/kernels/bf16_parts.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/x86/vec_avx512.h"

namespace marlin::cpu {

namespace {

// Avx512 under another name, so that no template instance here shares a symbol with code for plain AVX-512.
struct Avx512Bf16 : Avx512 {};

using V = Avx512Bf16;

// s.x holds the packed activations as [k/8, pair, part, R]. Pair j holds the activations of k = j and j + 4 in 32 bits.
template <int parts, int R, int C>
void dot_step(const Step& s) {
  // Each part has its own accumulators. If one row's parts shared them, each instruction would wait for the previous
  // one.
  constexpr int sums = parts * R * C;
  const __m512i table = bf16_table(_mm512_loadu_si512(s.values));
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* x = static_cast<const int32_t*>(s.x);
  add_chunk<V, R, C>(s, [&](int begin, int end, Accumulators<V, R, C>& total) __attribute__((always_inline)) {
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
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      total[i] = acc[i];
      if constexpr (parts == 3) {
        total[i] = _mm512_add_ps(acc[i], _mm512_add_ps(acc[R * C + i], acc[2 * R * C + i]));
      }
    });
  });
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

constexpr Bf16DotKernels kDot{dot_kernel<3, 1, 1, V::small_m_vectors>(),
                              dot_kernel<1, 1, V::small_m_rows, V::small_m_vectors>(),
                              dot_kernel<1, V::small_m_rows, V::large_m_rows, V::large_m_vectors>()};

}  // namespace

const Bf16DotKernels* bf16_dot_kernels() {
  return &kDot;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
