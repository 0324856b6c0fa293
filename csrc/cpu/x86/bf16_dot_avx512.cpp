// Products with AVX512-BF16: vdpbf16ps multiplies pairs of bf16 and adds in fp32. Every code is exact in bf16 (integers
// below 256, E2M1, E4M3). An activation is a sum of bf16 terms ("parts"): one part for a bf16 activation, three parts
// of 8 bits for an fp32 activation. The instruction flushes subnormals, so activations outside 2^-96 .. 2^120 go to the
// kernels that multiply in fp32 (bf16_parts.h).
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512bf16,avx512vbmi")

#include "csrc/cpu/kernels/bf16_parts.h"
#include "csrc/cpu/kernels/planes.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/x86/bf16_codes.h"
#include "csrc/cpu/x86/vec_avx512.h"

namespace marlin::cpu {

namespace {

// A distinct type, so that no template instance in this file shares a symbol with code for plain AVX-512.
struct Avx512Bf16 : Avx512 {};

using V = Avx512Bf16;

constexpr int kRowPairs = kChunk / 2;  // the distance between two packed rows, in pairs

// s.x holds the packed activations as [part, R, k/8, pair]. Pair j holds the activations of two k in 32 bits: k = j and
// j + 4. For codes of 8 bits the pairs are k = 0 and 2, 1 and 3, 4 and 6, 5 and 7. The panel holds the same pairs of
// codes, as [k/8, pair, column].
template <Codes codes, bool from_panel, int parts, int R, int C>
void dot_step(const Step& s) {
  // Each part has its own accumulators. If the parts of one row shared accumulators, each instruction would wait for
  // the previous one.
  constexpr int sums = parts * R * C;
  constexpr bool bytes = is_byte_wide(codes) || codes == Codes::planes;
  const auto table = [&] {
    if constexpr (bytes) return BytePairs<codes>(s.values);
    if constexpr (!bytes) return bf16_table(_mm512_loadu_si512(s.values));
  }();
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const float* panel = s.panel;
  const auto* x = static_cast<const int32_t*>(s.x);
  add_chunk<V, R, C>(s, [&](int begin, int end, Accumulators<V, R, C>& total) __attribute__((always_inline)) {
    __m512 acc[sums];
    unroll<V, sums>([&](auto i) __attribute__((always_inline)) { acc[i] = _mm512_setzero_ps(); });
    for (int k = begin; k < end; k += 8) {
      __m512i word[C], code[C], odd[C], odd_pairs[C];
      unroll<V, 4>([&](auto j) __attribute__((always_inline)) {
        constexpr int kPairs = 4 / words_per_block(codes);  // pairs per word
        if constexpr (!from_panel && j % kPairs == 0) {
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            word[c] = V::load_words(words + c * V::width);
            __builtin_prefetch(ahead + c * V::width, 0, 2);
          });
          words += s.ld_words;
          ahead += s.ld_words;
        }
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          if constexpr (from_panel) {
            code[c] = _mm512_loadu_si512(panel + (j * C + c) * V::width);
          } else if constexpr (codes == Codes::planes) {
            // The even bytes are pairs 0 and 2, and the odd bytes are pairs 1 and 3.
            if constexpr (j == 0) {
              const HighWords<V> upper(s.high, k, c * V::width);
              table.pairs(upper.bytes<0>(word[c]), code[c], odd[c]);
              table.pairs(upper.bytes<1>(word[c]), odd_pairs[c], word[c]);
            } else {
              code[c] = j == 1 ? odd_pairs[c] : j == 2 ? odd[c] : word[c];
            }
          } else if constexpr (!bytes) {
            code[c] = code_pairs(word[c], j, table);
          } else if constexpr (j % 2 == 0) {
            table.pairs(word[c], code[c], odd[c]);
          } else {
            code[c] = odd[c];
          }
        });
        unroll<V, parts * R>([&](auto i) __attribute__((always_inline)) {
          const __m512i activation = _mm512_set1_epi32(x[i * kRowPairs + j]);
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            __m512& a = acc[i * C + c];
            a = _mm512_dpbf16_ps(a, (__m512bh)code[c], (__m512bh)activation);
          });
        });
      });
      x += 4;
      if constexpr (from_panel) panel += 4 * C * V::width;
    }
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      total[i] = acc[i];
      if constexpr (parts == 3) {
        total[i] = _mm512_add_ps(acc[i], _mm512_add_ps(acc[R * C + i], acc[2 * R * C + i]));
      }
    });
  });
}

template <class Decoded, int C>
void unpack_pairs(const Step& s, float* panel) {
  const Decoded codes(s.values);
  for (int row = 0; row < s.k / kBlockK; ++row, panel += 4 * C * V::width) {
    for (int c = 0; c < C; ++c) {
      __m512i pairs[4];
      codes.decode(s, row, c * V::width, pairs);
      for (int j = 0; j < 4; ++j)
        _mm512_storeu_si512(panel + (j * C + c) * V::width, pairs[j]);
    }
  }
}

template <int parts>
bool pack_pairs(const PackRow& p) {
  auto* to = static_cast<uint16_t*>(p.out) + p.row * kChunk;
  const PartsOfRow<parts, kMinActivation> row(p);
  __mmask16 bad = 0;
  for (int k = 0; k < p.count; k += 32)
    bad |= row.take(k, p.count,
                    [&](int part, __m512i pairs) { _mm512_storeu_si512(to + part * p.rows * kChunk + k, pairs); });
  return bad == 0;
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
  // All kinds of 4-bit codes use the same kernel, which decodes them with a table look-up.
  auto fill = [&]<Codes codes, int... i>(std::integral_constant<Codes, codes>, Codes of,
                                         std::integer_sequence<int, i...>) {
    auto& steps = kernel.step[static_cast<size_t>(of)];
    ((steps[static_cast<size_t>(min_rows + i)] = &dot_step<codes, false, parts, min_rows + i, C>), ...);
  };
  constexpr auto kRows = std::make_integer_sequence<int, max_rows - min_rows + 1>{};
  for (const Codes of : {Codes::integer, Codes::e2m1, Codes::table})
    fill(std::integral_constant<Codes, Codes::table>{}, of, kRows);
  fill(std::integral_constant<Codes, Codes::byte>{}, Codes::byte, kRows);
  fill(std::integral_constant<Codes, Codes::e4m3>{}, Codes::e4m3, kRows);
  fill(std::integral_constant<Codes, Codes::planes>{}, Codes::planes, kRows);
  return kernel;
}

// The same products with codes from a panel, so the steps are the same for all codes.
constexpr MatrixKernel panel_kernel(MatrixKernel kernel) {
  constexpr int C = V::large_m_vectors;
  kernel.panel_bytes = 2 * kChunk * kernel.strip;
  [&]<int... i>(std::integer_sequence<int, i...>) {
    constexpr int first = V::small_m_rows;
    for (auto& steps : kernel.step)
      ((steps[static_cast<size_t>(first + i)] = &dot_step<Codes::table, true, 1, first + i, C>), ...);
  }(std::make_integer_sequence<int, V::large_m_rows - V::small_m_rows + 1>{});
  kernel.unpack.fill(&unpack_pairs<CodesInParts<1>, C>);
  kernel.unpack[static_cast<size_t>(Codes::byte)] = &unpack_pairs<ByteCodes<Codes::byte>, C>;
  kernel.unpack[static_cast<size_t>(Codes::e4m3)] = &unpack_pairs<ByteCodes<Codes::e4m3>, C>;
  kernel.unpack[static_cast<size_t>(Codes::planes)] = &unpack_pairs<ByteCodes<Codes::planes>, C>;
  return kernel;
}

constexpr MatrixKernel rounded_kernel(MatrixKernel kernel) {
  constexpr int C = V::large_m_vectors;
  kernel.rounded_panel = true;
  kernel.unpack.fill(&unpack_pairs<Rounded<Codes::table>, C>);
  kernel.unpack[static_cast<size_t>(Codes::byte)] = &unpack_pairs<Rounded<Codes::byte>, C>;
  kernel.unpack[static_cast<size_t>(Codes::e4m3)] = &unpack_pairs<Rounded<Codes::e4m3>, C>;
  kernel.unpack[static_cast<size_t>(Codes::planes)] = &unpack_pairs<Rounded<Codes::planes>, C>;
  return kernel;
}

constexpr MatrixKernel kLargeM = dot_kernel<1, V::small_m_rows, V::large_m_rows, V::large_m_vectors>();
constexpr Bf16DotKernels kDot{dot_kernel<3, 1, 1, V::small_m_vectors>(),
                              dot_kernel<1, 1, V::small_m_rows, V::small_m_vectors>(), kLargeM, panel_kernel(kLargeM),
                              rounded_kernel(panel_kernel(kLargeM))};

}  // namespace

const Bf16DotKernels* bf16_dot_kernels() {
  return &kDot;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
