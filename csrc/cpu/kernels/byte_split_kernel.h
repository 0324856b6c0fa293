// The byte_split kernels for any vector policy V: products of split activations (byte_split.h) and codes, which are
// bytes, too. The 32-bit sums of products are exact. Include this file after the ISA pragma. V must define everything
// that the policies in vec_*.h define, and also:
//   kBytes             the number of bytes of an activation, 3 or 1
//   Bytes, Sums        vectors of bytes and of 32-bit sums, with set_sums and to_float
//   kE2M1Offset        added to twice an E2M1 value to make a byte: 12 if the instruction needs unsigned bytes, else 0
//   kOperandsPerLoad   the number of 32-bit operands per load
//   nibbles, load_table, look_up
//   add_products       adds the products of a range of k
//   kNearRow           optional; true for codes whose kernel for one row prefetches into the first-level cache
#pragma once

#include <utility>

#include "csrc/cpu/kernels/byte_split.h"
#include "csrc/cpu/kernels/planes.h"
#include "csrc/cpu/kernels/segments.h"

namespace marlin::cpu {

// Decodes four of eight k to bytes. In a word of 4-bit codes, these are the even k or the odd k, with the upper bits of
// the second plane if there is one. For codes of 8 bits they are one of two words, which needs no decoding. A byte
// represents the value (byte - offset) * unit.
template <class V, Codes codes>
class CodeBytes {
 public:
  static constexpr float unit = codes == Codes::e2m1 ? 0.5F : 1.F;

  explicit CodeBytes(const float* values)
      : offset_(codes == Codes::e2m1 ? V::kE2M1Offset : -static_cast<int>(values[0])) {
    if constexpr (codes == Codes::e2m1) {
      alignas(16) int8_t table[16];
      for (int q = 0; q < 16; ++q)
        table[q] = static_cast<int8_t>(2 * values[q] + V::kE2M1Offset);
      table_ = V::load_table(table);
    }
  }
  int offset() const { return offset_; }
  template <int odd>
  [[gnu::always_inline]] typename V::Bytes decode(typename V::I words) const {
    static_assert(codes != Codes::planes, "needs the second plane");
    if constexpr (codes == Codes::byte) return words;
    const typename V::Bytes nibbles = V::template nibbles<odd>(words);
    if constexpr (codes == Codes::e2m1) return V::look_up(table_, nibbles);
    return nibbles;
  }
  // Also decodes codes in two planes. `k` is the first of the eight k, and `column` is the first column of `words`.
  template <int odd>
  [[gnu::always_inline]] typename V::Bytes decode(typename V::I words, const HighPlane& high, int k, int column) const {
    if constexpr (codes == Codes::planes) {
      return HighWords<V>(high, k, column).template bytes<odd>(words);
    } else {
      return decode<odd>(words);
    }
  }

 private:
  typename V::Bytes table_{};
  int offset_;
};

// The addresses from which the products of the next 8 k read.
template <class V, Codes codes, int R>
struct SplitOperands {
  const uint32_t* words;
  const uint32_t* ahead;
  const int32_t* x;  // in the layout of pack_split
  int64_t ld_words;
  HighPlane high;

  [[gnu::always_inline]] void advance() {
    words += words_per_block(codes) * ld_words;
    ahead += words_per_block(codes) * ld_words;
    x += operands_of<V>(R);
  }
};

template <class V, int R, int C>
using SplitSums = typename V::Sums[V::kBytes * R * C];

template <class V, Codes codes, int R, int C>
void split_step(const Step& s) {
  constexpr int kBytes = V::kBytes;
  const CodeBytes<V, codes> bytes(s.values);
  const auto* header = static_cast<const int32_t*>(s.x);
  SplitOperands<V, codes, R> next{s.words, s.ahead, header + kMaxGroups * kHeader<kBytes> * R, s.ld_words, s.high};
  add_chunk<V, R, C>(s, [&](int first, int last, Accumulators<V, R, C>& total) __attribute__((always_inline)) {
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { total[i] = V::zero(); });
    for (int begin = first, end; begin < last; begin = end) {
      end = last - begin < kUnitGroup<kBytes> ? last : begin + kUnitGroup<kBytes>;
      SplitSums<V, R, C> sums;
      unroll<V, kBytes * R>([&](auto i) __attribute__((always_inline)) {
        const typename V::Sums start = V::set_sums(-bytes.offset() * header[R + i]);
        unroll<V, C>([&](auto c) __attribute__((always_inline)) { sums[i * C + c] = start; });
      });
      V::template add_products<codes, R, C>(bytes, next, begin, end, sums);
      unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
        auto of_byte = [&](int byte) __attribute__((always_inline)) { return V::to_float(sums[byte * R * C + i]); };
        const typename V::F unit = V::set1(std::bit_cast<float>(header[i / C]) * CodeBytes<V, codes>::unit);
        if constexpr (kBytes == 1) {
          total[i] = V::fma(of_byte(0), unit, total[i]);
        } else {
          const typename V::F low = V::fma(of_byte(1), V::set1(0x1p8F), of_byte(2));
          total[i] = V::mul(V::fma(of_byte(0), V::set1(0x1p16F), low), unit);
        }
      });
      header += kHeader<kBytes> * R;
    }
  });
}

template <class V, int max_rows, int C, bool with_bytes = false, bool with_planes = false>
constexpr MatrixKernel split_kernel(bool (*pack)(const PackRow&)) {
  MatrixKernel kernel{};
  kernel.strip = C * V::width;
  kernel.min_rows = 1;
  kernel.max_rows = max_rows;
  kernel.row_unit = 1;
  kernel.row_bytes = split_row_bytes<V>();
  kernel.pack = pack;
  auto fill = [&]<Codes codes, int... i>(std::integer_sequence<int, i...>) {
    ((kernel.step[static_cast<size_t>(codes)][static_cast<size_t>(1 + i)] = &split_step<V, codes, 1 + i, C>), ...);
    if constexpr (requires { V::template kNearRow<codes>; })
      kernel.near_row[static_cast<size_t>(codes)] = V::template kNearRow<codes>;
  };
  fill.template operator()<Codes::integer>(std::make_integer_sequence<int, max_rows>{});
  fill.template operator()<Codes::e2m1>(std::make_integer_sequence<int, max_rows>{});
  if constexpr (with_bytes) fill.template operator()<Codes::byte>(std::make_integer_sequence<int, max_rows>{});
  if constexpr (with_planes) fill.template operator()<Codes::planes>(std::make_integer_sequence<int, max_rows>{});
  return kernel;
}

}  // namespace marlin::cpu
