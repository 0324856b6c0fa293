// The fp32 kernels. Every function is a template of a vector policy V (vec_*.h), so the code of different instruction
// sets never shares a symbol.
#pragma once

#include <algorithm>
#include <utility>

#include "csrc/cpu/kernels/e4m3_row.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/kernels/planes.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/unroll.h"

namespace marlin::cpu {

// The decoder of codes. Codes in two planes are joined to bytes before they are decoded.
template <class V, Codes codes>
using DecoderOf = typename V::template Decoder<codes == Codes::planes ? Codes::byte : codes>;

// The power of two by which the numbers of a decoder must be multiplied to get the values of the codes.
template <class Decoder>
constexpr float unit_of() {
  if constexpr (requires { Decoder::unit; }) return Decoder::unit;
  return 1.F;
}

// The words of eight k in C vectors of columns.
template <class V, Codes codes, int C>
struct Block {
  static constexpr int kRows = words_per_block(codes);
  // The joined codes of two planes are two words of bytes: even k, and odd k.
  static constexpr int kWords = codes == Codes::planes ? 2 : kRows;
  static constexpr int kCodes = kBlockK / kWords;  // codes per word
  typename V::I word[kWords * C];

  // `k` is the first of the eight k, counted from the first k of the second plane.
  [[gnu::always_inline]] Block(const uint32_t* words, int64_t ld_words, const HighPlane& high, int k) {
    unroll<V, kRows * C>([&](auto i) __attribute__((always_inline)) {
      word[i] = V::load_words(words + i / C * ld_words + i % C * V::width);
    });
    if constexpr (codes == Codes::planes) {
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        const HighWords<V> upper(high, k, c * V::width);
        word[C + c] = upper.template bytes<1>(word[c]);
        word[c] = upper.template bytes<0>(word[c]);
      });
    }
  }
  // Returns the values of the codes of k = j, in vector c, in the unit of the decoder.
  template <int j, int c>
  [[gnu::always_inline]] typename V::F decode(const DecoderOf<V, codes>& decoder) const {
    if constexpr (codes == Codes::planes) return decoder.template decode<j / 2>(word[j % 2 * C + c]);
    return decoder.template decode<j % kCodes>(word[j / kCodes * C + c]);
  }
  template <int j, int c>
  [[gnu::always_inline]] typename V::F value(const DecoderOf<V, codes>& decoder) const {
    constexpr float kUnit = unit_of<DecoderOf<V, codes>>();
    const typename V::F decoded = decode<j, c>(decoder);
    return kUnit == 1.F ? decoded : V::mul(decoded, V::set1(kUnit));
  }
};

// Prefetches the words of a Block.
template <class V, Codes codes, int C>
[[gnu::always_inline]] inline void prefetch_block(const uint32_t* words, int64_t ld_words) {
  for (int row = 0; row < words_per_block(codes); ++row) {
    for (int i = 0; i < C * V::width; i += 16)
      __builtin_prefetch(words + row * ld_words + i, 0, 2);
  }
}

// s.x is [k, R]: the R activations of each k are adjacent.
template <class V, Codes codes, bool from_panel, int R, int C>
void step(const Step& s) {
  using F = typename V::F;
  const DecoderOf<V, codes> decoder(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const float* panel = s.panel;
  const float* x = static_cast<const float*>(s.x);
  add_chunk<V, R, C>(s, [&](int begin, int end, Accumulators<V, R, C>& acc) __attribute__((always_inline)) {
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { acc[i] = V::zero(); });
    const auto multiply = [&](auto j, const F(&code)[C]) __attribute__((always_inline)) {
      unroll<V, R>([&](auto i) __attribute__((always_inline)) {
        const F activation = V::set1(x[j * R + i]);
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          acc[i * C + c] = V::fma(code[c], activation, acc[i * C + c]);
        });
      });
    };
    for (int k = begin; k < end; k += 8, x += 8 * R) {
      if constexpr (from_panel) {
        unroll<V, 8>([&](auto j) __attribute__((always_inline)) {
          F code[C];
          unroll<V, C>([&](auto c)
                           __attribute__((always_inline)) { code[c] = V::load(panel + (j * C + c) * V::width); });
          multiply(j, code);
        });
        panel += 8 * C * V::width;
      } else {
        const Block<V, codes, C> block(words, s.ld_words, s.high, k);
        prefetch_block<V, codes, C>(ahead, s.ld_words);
        unroll<V, 8>([&](auto j) __attribute__((always_inline)) {
          F code[C];
          unroll<V, C>([&](auto c) __attribute__((always_inline)) { code[c] = block.template decode<j, c>(decoder); });
          multiply(j, code);
        });
        words += block.kRows * s.ld_words;
        ahead += block.kRows * s.ld_words;
      }
    }
    constexpr float kUnit = from_panel ? 1.F : unit_of<DecoderOf<V, codes>>();
    if constexpr (kUnit != 1.F) {
      unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { acc[i] = V::mul(acc[i], V::set1(kUnit)); });
    }
  });
}

template <class V, Codes codes, int C>
void unpack(const Step& s, float* panel) {
  const DecoderOf<V, codes> decoder(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  for (int k = 0; k < s.k; k += 8, panel += 8 * C * V::width) {
    const Block<V, codes, C> block(words, s.ld_words, s.high, k);
    prefetch_block<V, codes, C>(ahead, s.ld_words);
    unroll<V, 8 * C>([&](auto i) __attribute__((always_inline)) {
      V::store(panel + i * V::width, block.template value<i / C, i % C>(decoder));
    });
    words += block.kRows * s.ld_words;
    ahead += block.kRows * s.ld_words;
  }
}

template <class V>
bool pack_fp32(const PackRow& p) {
  float* to = static_cast<float*>(p.out) + p.row;
  for (int k = 0; k < p.count; ++k, to += p.rows)
    *to = p.values[k];
  return true;
}

template <class V>
void to_float(const void* source, ElementType type, int64_t count, float* out) {
  int64_t i = 0;
  if (type == ElementType::float16) {
    const auto* in = static_cast<const uint16_t*>(source);
    for (; i + V::width <= count; i += V::width)
      V::store(out + i, V::load_half(in + i));
    for (; i < count; ++i)
      out[i] = half_to_float(in[i]);
  } else if (type == ElementType::bfloat16) {
    const auto* in = static_cast<const uint16_t*>(source);
    for (; i < count; ++i)
      out[i] = bfloat16_to_float(in[i]);
  } else if (type == ElementType::uint8) {
    const auto* in = static_cast<const uint8_t*>(source);
    for (; i < count; ++i)
      out[i] = static_cast<float>(in[i]);
  } else if (type == ElementType::int8) {
    const auto* in = static_cast<const int8_t*>(source);
    for (; i < count; ++i)
      out[i] = static_cast<float>(in[i]);
  } else {
    const auto* in = static_cast<const float*>(source);
    for (; i < count; ++i)
      out[i] = in[i];
  }
}

template <class V>
void scale_codes(const void* codes, ElementType of_codes, const void* values, ElementType type, int64_t count,
                 float* out) {
  const bool is_signed = of_codes == ElementType::int8;
  const auto* code = static_cast<const uint8_t*>(codes);
  int64_t i = 0;
  if (type == ElementType::float16) {
    const auto* value = static_cast<const uint16_t*>(values);
    for (; i + V::width <= count; i += V::width)
      V::store(out + i, V::mul(V::load_bytes(code + i, is_signed), V::load_half(value + i)));
  }
  for (; i < count; ++i)
    out[i] = load_element(codes, of_codes, i) * load_element(values, type, i);
}

// Converts E4M3 codes through fp16. The exponent and mantissa of a code are shifted into the same fields of an fp16.
// The exponent bias of E4M3 is 7 and that of fp16 is 15. So the fp16 is the code's value times 2^-8, also for
// subnormals, and a multiplication by 256 = 2^8 corrects this.
template <class V>
void decode_scales(const uint8_t* source, ScaleCoding coding, int64_t count, float* out) {
  int64_t i = 0;
  if (coding == ScaleCoding::e4m3) {
    constexpr int kBlock = 64;
    for (; i + kBlock <= count; i += kBlock) {
      uint16_t half[kBlock];
      for (int j = 0; j < kBlock; ++j) {
        const unsigned code = source[i + j];
        const unsigned nan = (code & 0x7FU) == 0x7FU ? 0x7E00U : 0U;
        half[j] = static_cast<uint16_t>((code & 0x80U) << 8 | (code & 0x7FU) << 7 | nan);
      }
      for (int j = 0; j < kBlock; j += V::width) {
        V::store(out + i + j, V::mul(V::load_half(half + j), V::set1(256.F)));
      }
    }
    for (; i < count; ++i)
      out[i] = e4m3_to_float(source[i]);
  } else {
    // Computes the same as e8m0_to_float. The comparisons use 32 bits, because GCC would otherwise compare bytes and
    // widen the masks.
    const uint8_t* __restrict codes = source;
    float* __restrict to = out;
    for (; i < count; ++i) {
      constexpr uint32_t kSmallest = 0x00400000, kNan = 0x7F800000, kQuiet = 0x00400000;
      const uint32_t bits = uint32_t{codes[i]} << 23;
      to[i] = std::bit_cast<float>(std::max(bits, kSmallest) | (bits == kNan ? kQuiet : 0U));
    }
  }
}

template <class V>
void from_float(const float* __restrict source, ElementType type, int64_t count, void* __restrict out) {
  int64_t i = 0;
  if (type == ElementType::float16) {
    auto* __restrict to = static_cast<uint16_t*>(out);
    for (; i + V::width <= count; i += V::width)
      V::store_half(to + i, V::load(source + i));
    for (; i < count; ++i)
      to[i] = float_to_half(source[i]);
  } else if (type == ElementType::bfloat16) {
    auto* __restrict to = static_cast<uint16_t*>(out);
    for (; i < count; ++i)
      to[i] = float_to_bfloat16(source[i]);
  } else {
    auto* __restrict to = static_cast<float*>(out);
    for (; i < count; ++i)
      to[i] = source[i];
  }
}

template <class V, ElementType type>
[[gnu::always_inline]] inline void store_pair(void* out, int64_t i, typename V::F a, typename V::F b) {
  if constexpr (type == ElementType::float16) {
    V::store_half(static_cast<uint16_t*>(out) + i, a);
    V::store_half(static_cast<uint16_t*>(out) + i + V::width, b);
  } else if constexpr (type == ElementType::bfloat16) {
    V::store_bfloat16(static_cast<uint16_t*>(out) + i, a, b);
  } else {
    V::store(static_cast<float*>(out) + i, a);
    V::store(static_cast<float*>(out) + i + V::width, b);
  }
}

// Decodes eight rows of the weight in the order of the format's formula (kernels/shared/types.h). Rounds each product
// and sum to fp32.
template <class V, Codes codes, ElementType type, ZerosRole role>
[[gnu::always_inline]] inline void dequantize_as(const DequantizeBlock& d) {
  using F = typename V::F;
  const DecoderOf<V, codes> decoder(d.values);
  for (int i = 0; i < d.count; i += 2 * V::width) {
    const Block<V, codes, 2> block(d.words + i, d.ld_words, {d.high.words + i, d.high.ld_words, d.high.bits}, d.high_k);
    F scale[2], zero[2], w[2];
    unroll<V, 2>([&](auto c) __attribute__((always_inline)) {
      scale[c] = V::load(d.scales + i + c * V::width);
      if constexpr (role != ZerosRole::none) zero[c] = V::load(d.zeros + i + c * V::width);
    });
    unroll<V, 8>([&](auto j) __attribute__((always_inline)) {
      unroll<V, 2>([&](auto c) __attribute__((always_inline)) {
        w[c] = block.template value<j, c>(decoder);
        if constexpr (role == ZerosRole::zero_point) w[c] = V::sub(w[c], zero[c]);
        w[c] = V::mul(w[c], scale[c]);
        if constexpr (role == ZerosRole::bias) w[c] = V::add(V::rounded(w[c]), zero[c]);
      });
      store_pair<V, type>(d.out + j * kDequantizeColumns * element_bytes(type), i, w[0], w[1]);
    });
  }
}

template <class V, Codes codes>
void dequantize(const DequantizeBlock& d) {
  auto with_role = [&]<ElementType type>() {
    switch (d.role) {
      case ZerosRole::none:
        return dequantize_as<V, codes, type, ZerosRole::none>(d);
      case ZerosRole::zero_point:
        return dequantize_as<V, codes, type, ZerosRole::zero_point>(d);
      case ZerosRole::bias:
        return dequantize_as<V, codes, type, ZerosRole::bias>(d);
    }
  };
  switch (d.out_type) {
    case ElementType::float16:
      return with_role.template operator()<ElementType::float16>();
    case ElementType::bfloat16:
      return with_role.template operator()<ElementType::bfloat16>();
    default:
      return with_role.template operator()<ElementType::float32>();
  }
}

template <class V>
void stream(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  int64_t i = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % 64));
  std::memcpy(out, in, static_cast<size_t>(i));
  for (; i + 64 <= bytes; i += 64)
    V::stream_line(out + i, in + i);
  std::memcpy(out + i, in + i, static_cast<size_t>(bytes - i));
}

template <class V>
void gather_codes(const GatherCodes& g) {
  int64_t n = 0;
  for (; n + V::width <= g.count; n += V::width) {
    typename V::I word{};
    unroll<V, 8>([&](auto j) __attribute__((always_inline)) {
      word = V::template insert_code<j>(word, V::load_words(g.from[j] + n), g.shift[j]);
    });
    V::store_words(g.out + n, word);
  }
  for (; n < g.count; ++n) {
    uint32_t word = 0;
    for (size_t j = 0; j < 8; ++j)
      word |= ((g.from[j][n] >> g.shift[j]) & 15U) << (4 * j);
    g.out[n] = word;
  }
}

template <class V, bool from_panel, int min_rows, int max_rows, int C>
constexpr MatrixKernel matrix_kernel() {
  MatrixKernel kernel{};
  kernel.strip = C * V::width;
  kernel.min_rows = min_rows;
  kernel.max_rows = max_rows;
  kernel.row_unit = 1;
  kernel.panel_bytes = from_panel ? static_cast<int>(sizeof(float)) * C * V::width * kChunk : 0;
  kernel.row_bytes = kChunk * int{sizeof(float)};
  kernel.pack = &pack_fp32<V>;
  auto fill = [&]<Codes codes>() {
    auto& steps = kernel.step[static_cast<size_t>(codes)];
    // Vectors with 16-entry look-ups use one decoder for all codes. Steps that read a panel do not decode, so one
    // instance works for all codes.
    constexpr Codes decoder = codes == Codes::planes ? codes : V::template decoder_for<codes>;
    constexpr Codes used = from_panel ? Codes::table : decoder;
    [&]<int... i>(std::integer_sequence<int, i...>) {
      ((steps[static_cast<size_t>(min_rows + i)] = &step<V, used, from_panel, min_rows + i, C>), ...);
    }(std::make_integer_sequence<int, max_rows - min_rows + 1>{});
    if constexpr (codes == Codes::e4m3 && min_rows == 1 && requires { typename V::E4M3Pairs; }) {
      steps[1] = &e4m3_row<V, C>;
      kernel.near_row[static_cast<size_t>(codes)] = true;
    }
    kernel.unpack[static_cast<size_t>(codes)] = &unpack<V, decoder, C>;
  };
  fill.template operator()<Codes::integer>();
  fill.template operator()<Codes::e2m1>();
  fill.template operator()<Codes::table>();
  fill.template operator()<Codes::byte>();
  fill.template operator()<Codes::e4m3>();
  fill.template operator()<Codes::planes>();
  return kernel;
}

template <class V>
constexpr KernelSet kernel_set() {
  // More than small_m_rows rows are divided into blocks of nearly equal size for the large_m kernel, which computes up
  // to large_m_rows rows. The smallest block is the smaller of two cases: a single block of small_m_rows + 1 rows, or
  // half of large_m_rows + 1 rows, which need two blocks.
  constexpr int min_rows = std::min(V::small_m_rows, (V::large_m_rows + 1) / 2);
  return {
      matrix_kernel<V, false, 1, V::small_m_rows, V::small_m_vectors>(),
      matrix_kernel<V, V::large_m_from_panel, min_rows, V::large_m_rows, V::large_m_vectors>(),
      &to_float<V>,
      &scale_codes<V>,
      &decode_scales<V>,
      &from_float<V>,
      {&dequantize<V, V::template decoder_for<Codes::integer>>, &dequantize<V, V::template decoder_for<Codes::e2m1>>,
       &dequantize<V, Codes::table>, &dequantize<V, V::template decoder_for<Codes::byte>>,
       &dequantize<V, V::template decoder_for<Codes::e4m3>>, &dequantize<V, Codes::planes>},
      &gather_codes<V>,
      &stream<V>};
}

}  // namespace marlin::cpu

// Defines a function that returns the kernels for the vector policy V.
#define MARLIN_KERNEL_SET(function, V)                     \
  namespace marlin::cpu {                                  \
  const KernelSet* function() {                            \
    static constexpr KernelSet kKernels = kernel_set<V>(); \
    return &kKernels;                                      \
  }                                                        \
  }
