// Products with FEAT_BF16. One row uses bfdot. More rows use bfmmla, which multiplies twice as many values per
// instruction. Every code is exact in bf16. An activation is a sum of bf16 terms ("parts"): one part for a bf16
// activation, three for an fp32 activation. The instructions may round sums to odd. They also flush subnormals, so
// activations outside 2^-96 .. 2^120 go to the kernels that multiply in fp32 (bf16_parts.h).
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET("bf16")

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/cpu/kernels/bf16_parts.h"
#include "csrc/cpu/kernels/segments.h"

namespace marlin::cpu {

namespace {

// A distinct type, so that no template instance in this file shares a symbol with code for plain NEON.
struct NeonBf16 : Neon {};

using V = NeonBf16;

// Four words, one per column, decoded to the operands of four instructions. `of` is [even k, odd k][columns 0 and 1,
// columns 2 and 3]. An operand holds four k of two columns.
struct Operands {
  bfloat16x8_t of[2][2];
};

// Looks up the bf16 values of codes, with one table for the upper bytes and one for the lower bytes.
class Table {
 public:
  explicit Table(const float* values) {
    uint8_t upper[16], lower[16];
    for (int q = 0; q < 16; ++q) {
      const uint32_t bits = std::bit_cast<uint32_t>(values[q]);
      upper[q] = static_cast<uint8_t>(bits >> 24);
      lower[q] = static_cast<uint8_t>(bits >> 16);
    }
    upper_ = vld1q_u8(upper);
    lower_ = vld1q_u8(lower);
  }
  [[gnu::always_inline]] Operands decode(uint32x4_t words) const {
    const uint8x16_t bytes = vreinterpretq_u8_u32(words);
    const uint8x16_t codes[2] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
    Operands operands;
    unroll<V, 2>([&](auto odd) __attribute__((always_inline)) {
      const uint8x16_t upper = vqtbl1q_u8(upper_, codes[odd]), lower = vqtbl1q_u8(lower_, codes[odd]);
      operands.of[odd][0] = vreinterpretq_bf16_u8(vzip1q_u8(lower, upper));
      operands.of[odd][1] = vreinterpretq_bf16_u8(vzip2q_u8(lower, upper));
    });
    return operands;
  }

 private:
  uint8x16_t upper_;
  uint8x16_t lower_;
};

template <int C>
[[gnu::always_inline]] inline void load_words(const uint32_t* words, const uint32_t* ahead, uint32x4_t (&to)[C]) {
  unroll<V, C>([&](auto c) __attribute__((always_inline)) { to[c] = V::load_words(words + c * V::width); });
  for (int i = 0; i < C * V::width; i += 16)
    __builtin_prefetch(ahead + i, 0, 2);
}

// Computes one row. s.x holds the packed activations as [k/8][even or odd k][part]. Each element is four bf16.
template <int parts, int C>
void dot_step(const Step& s) {
  const Table table(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* x = static_cast<const uint64_t*>(s.x);
  add_chunk<V, 1, C>(s, [&](int begin, int end, Accumulators<V, 1, C>& total) __attribute__((always_inline)) {
    float32x4_t acc[2 * C];  // the sum of each column is spread over two lanes
    unroll<V, 2 * C>([&](auto i) __attribute__((always_inline)) { acc[i] = V::zero(); });
    for (int k = begin; k < end; k += 8) {
      uint32x4_t word[C];
      load_words(words, ahead, word);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        const Operands code = table.decode(word[c]);
        unroll<V, 2 * parts>([&](auto i) __attribute__((always_inline)) {
          const bfloat16x8_t activation = vreinterpretq_bf16_u64(vdupq_n_u64(x[i]));
          unroll<V, 2>([&](auto half) __attribute__((always_inline)) {
            acc[2 * c + half] = vbfdotq_f32(acc[2 * c + half], code.of[i / parts][half], activation);
          });
        });
      });
      words += s.ld_words;
      ahead += s.ld_words;
      x += 2 * parts;
    }
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { total[c] = vpaddq_f32(acc[2 * c], acc[2 * c + 1]); });
  });
}

// Computes several rows. s.x holds the packed activations as [k/8][even or odd k][pair of rows]. Each element is four
// bf16 of each of the two rows.
template <int R, int C>
void matrix_step(const Step& s) {
  constexpr int kPairs = (R + 1) / 2;
  const Table table(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* x = static_cast<const uint16_t*>(s.x);
  add_chunk<V, R, C>(s, [&](int begin, int end, Accumulators<V, R, C>& total) __attribute__((always_inline)) {
    float32x4_t acc[2 * kPairs * C];  // each vector holds two rows of two columns
    unroll<V, 2 * kPairs * C>([&](auto i) __attribute__((always_inline)) { acc[i] = V::zero(); });
    for (int k = begin; k < end; k += 8) {
      uint32x4_t word[C];
      load_words(words, ahead, word);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        const Operands code = table.decode(word[c]);
        unroll<V, 2 * kPairs>([&](auto i) __attribute__((always_inline)) {
          const bfloat16x8_t activation = vreinterpretq_bf16_u16(vld1q_u16(x + 8 * i));
          unroll<V, 2>([&](auto half) __attribute__((always_inline)) {
            float32x4_t& a = acc[2 * (i % kPairs * C + c) + half];
            a = vbfmmlaq_f32(a, activation, code.of[i / kPairs][half]);
          });
        });
      });
      words += s.ld_words;
      ahead += s.ld_words;
      x += 16 * kPairs;
    }
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      const float64x2_t low = vreinterpretq_f64_f32(acc[2 * (i / C / 2 * C + i % C)]);
      const float64x2_t high = vreinterpretq_f64_f32(acc[2 * (i / C / 2 * C + i % C) + 1]);
      total[i] = vreinterpretq_f32_f64(i / C % 2 == 0 ? vzip1q_f64(low, high) : vzip2q_f64(low, high));
    });
  });
}

// Splits each values[k] into the sum of the bf16 terms bits[0][k], bits[1][k] and so on. The sum is exact if values[k]
// has at most 8 * parts significant bits. Returns false if a value is too small for the instructions, or so large that
// a part could overflow.
template <int parts>
bool split_bf16(const float* values, int count, uint16_t (&bits)[parts][kChunk]) {
  uint32_t out_of_range = 0;
  for (int k = 0; k < count; ++k) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU;
    out_of_range |= static_cast<uint32_t>(magnitude != 0) &
                    static_cast<uint32_t>(magnitude - kMinActivation >= kActivationEnd - kMinActivation);
    float rest = values[k];
    for (int part = 0; part < parts; ++part) {
      bits[part][k] = float_to_bfloat16(rest);
      rest -= bfloat16_to_float(bits[part][k]);
    }
  }
  return out_of_range == 0;
}

template <int parts>
bool pack_row(const PackRow& p) {
  uint16_t bits[parts][kChunk];
  const bool good = split_bf16<parts>(p.values, p.count, bits);
  auto* to = static_cast<uint16_t*>(p.out);
  for (int k = 0; k < p.count; k += 8) {
    for (int odd = 0; odd < 2; ++odd) {
      for (int part = 0; part < parts; ++part) {
        for (int i = 0; i < 4; ++i)
          *to++ = bits[part][k + 2 * i + odd];
      }
    }
  }
  return good;
}

// If the number of rows is odd, the last pair has a second row of undefined values. They do not affect the last row,
// because each row of a product depends only on the same row of activations.
bool pack_pairs(const PackRow& p) {
  uint16_t bits[1][kChunk];
  const bool good = split_bf16<1>(p.values, p.count, bits);
  const int pairs = (p.rows + 1) / 2;
  auto* to = static_cast<uint16_t*>(p.out) + p.row / 2 * 8 + p.row % 2 * 4;
  for (int k = 0; k < p.count; k += 8) {
    for (int odd = 0; odd < 2; ++odd, to += 8 * pairs) {
      for (int i = 0; i < 4; ++i)
        to[i] = bits[0][k + 2 * i + odd];
    }
  }
  return good;
}

template <int parts, int C>
constexpr MatrixKernel row_kernel() {
  MatrixKernel kernel{};
  kernel.strip = C * V::width;
  kernel.min_rows = 1;
  kernel.max_rows = 1;
  kernel.row_unit = 1;
  kernel.row_bytes = 2 * parts * kChunk;
  kernel.pack = &pack_row<parts>;
  for (auto& steps : kernel.step)
    steps[1] = &dot_step<parts, C>;
  return kernel;
}

template <int max_rows, int C>
constexpr MatrixKernel pairs_kernel() {
  MatrixKernel kernel{};
  kernel.strip = C * V::width;
  kernel.min_rows = 1;
  kernel.max_rows = max_rows;
  kernel.row_unit = 2;
  kernel.row_bytes = 2 * kChunk;
  kernel.pack = &pack_pairs;
  for (auto& steps : kernel.step) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
      ((steps[static_cast<size_t>(1 + i)] = &matrix_step<1 + i, C>), ...);
    }(std::make_integer_sequence<int, max_rows>{});
  }
  return kernel;
}

constexpr Bf16DotKernels kDot{row_kernel<3, 4>(), row_kernel<1, 4>(), pairs_kernel<8, 2>(), {}, {}};

}  // namespace

const Bf16DotKernels* bf16_dot_kernels() {
  return &kDot;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
