// Decodes packed words to bf16 codes, in the order of AMX tiles. Include this file after the ISA pragma. All
// definitions have internal linkage. In amx.cpp, the panel of a strip is [tile product][code part][2 column
// tiles][k/2][16 columns], and each element is a pair of bf16. The pairs of 8 k are (0, 4), (1, 5), (2, 6), (3, 7),
// because one shift of a word gives two codes that are 4 k apart. For codes of 8 bits the pairs are (0, 2), (1, 3), (4,
// 6), (5, 7).
#pragma once

#include "csrc/cpu/kernels/bf16_parts.h"
#include "csrc/cpu/kernels/planes.h"
#include "csrc/cpu/unroll.h"
#include "csrc/cpu/x86/vec_avx512.h"

namespace marlin::cpu {

namespace {

constexpr int kStrip = 32;  // columns: two tiles of 16

// Returns the number of k in one tile product. A segment of fewer than 32 k uses shorter tiles instead of padding.
constexpr int tile_k(int segment) {
  return segment < 32 ? segment : 32;
}

// Calls write(row of words, column, out) for the words of the tile product that begins at k, 16 words at a time. Each
// call must write four vectors, the codes of these words. Beyond the end of the segment, each_word writes zeros and
// does not call write. Returns the end of the output.
template <class Write>
[[gnu::always_inline]] inline __m512i* each_word(int k, int end, int tile, __m512i* out, Write write) {
  for (int column = 0; column < kStrip; column += 16) {
    for (int row = k / 8; row < (k + tile) / 8; ++row, out += 4) {
      if (8 * row < end) {
        write(row, column, out);
      } else {
        for (int j = 0; j < 4; ++j)
          _mm512_storeu_si512(out + j, _mm512_setzero_si512());
      }
    }
  }
  return out;
}

// Unpacks a tile product with codes.decode(), which decodes 8 k of 16 columns.
template <class Decoded>
[[gnu::always_inline]] inline __m512i* unpack_decoded(const Decoded& codes, const Step& s, int k, int end, int tile,
                                                      __m512i* to) {
  return each_word(k, end, tile, to, [&](int row, int column, __m512i* out) {
    __m512i pairs[4];
    codes.decode(s, row, column, pairs);
    for (int j = 0; j < 4; ++j)
      _mm512_storeu_si512(out + j, pairs[j]);
  });
}

[[gnu::always_inline]] inline __m512i load_words(const Step& s, int row, int column) {
  const int64_t at = row * s.ld_words + column;
  __builtin_prefetch(s.ahead + at, 0, 2);
  return Avx512::load_words(s.words + at);
}

[[gnu::always_inline]] inline __m512i code_pairs(__m512i word, int j, __m512i table) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4 * static_cast<unsigned>(j)), table);
}

// Rounds values to bf16 and returns the result in the upper half of each lane. Stores the remainder in `values`.
[[gnu::always_inline]] inline __m512i take_part(__m512& values) {
  const __m512i rounded = Avx512::round_high_half(values);
  const __m512i part = _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U)));
  values = _mm512_sub_ps(values, _mm512_castsi512_ps(part));
  return rounded;
}

// Splits a row of activations into bf16 parts and orders each run of eight k like the pairs of codes.
template <int parts, uint32_t min>
class PartsOfRow {
 public:
  [[gnu::always_inline]] explicit PartsOfRow(const PackRow& p)
      : values_(p.values),
        pairs_(p.byte_codes ? _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33,  //
                                               31, 27, 29, 25, 23, 19, 21, 17, 15, 11, 13, 9, 7, 3, 5, 1)
                            : _mm512_set_epi16(63, 55, 61, 53, 59, 51, 57, 49, 47, 39, 45, 37, 43, 35, 41, 33,  //
                                               31, 23, 29, 21, 27, 19, 25, 17, 15, 7, 13, 5, 11, 3, 9, 1)) {}

  // Calls store(part, pairs) for each part of the 32 values from k on, with zeros for the values from `end` on. Returns
  // a mask of the values that are too small for the instructions, or so large that a part could overflow.
  template <class Store>
  [[gnu::always_inline]] __mmask16 take(int k, int end, Store store) const {
    const auto present = static_cast<uint32_t>((uint64_t{1} << std::min(32, end - k)) - 1);
    __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(present), values_ + k);
    __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(present >> 16), values_ + k + 16);
    const __mmask16 bad = outside(low) | outside(high);
    for (int part = 0; part < parts; ++part) {
      const __m512i first = take_part(low);
      store(part, _mm512_permutex2var_epi16(first, pairs_, take_part(high)));
    }
    return bad;
  }

 private:
  [[gnu::always_inline]] static __mmask16 outside(__m512 values) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(static_cast<int>(min)));
    const __mmask16 beyond = _mm512_cmpge_epu32_mask(above, _mm512_set1_epi32(static_cast<int>(kActivationEnd - min)));
    return _mm512_mask_test_epi32_mask(beyond, magnitude, magnitude);
  }

  const float* values_;
  __m512i pairs_;
};

// Decodes codes to sums of bf16 parts. With one part and up to eight rows, the next panel is decoded between the tile
// products of the previous one. This was 1.08 to 1.10 times as fast on two and four threads and 1.03 times as fast on
// 16 (Intel Xeon). With 16 rows it was a fifth slower, because products of full tiles leave the core fewer free slots.
// With three parts the panel is decoded beforehand, because two panels of three parts would fill the first-level cache.
template <int code_parts>
class CodesInParts {
 public:
  static constexpr int ahead_rows = code_parts == 1 ? 8 : 0;
  static constexpr int parts = code_parts;
  static constexpr bool scaled = false;

  explicit CodesInParts(const float* values) {
    __m512 rest = _mm512_loadu_ps(values);
    for (__m512i& table : tables_)
      table = bf16_table(take_part(rest));
  }

  // Decodes 8 k of 16 columns, for codes of one part.
  [[gnu::always_inline]] void decode(const Step& s, int row, int column, __m512i (&pairs)[4]) const {
    const __m512i word = load_words(s, row, column);
    for (int j = 0; j < 4; ++j)
      pairs[j] = code_pairs(word, j, tables_[0]);
  }
  [[gnu::always_inline]] __m512i* unpack(const Step& s, int k, int end, __m512i* to) const {
    for (const __m512i table : tables_) {
      to = each_word(k, end, tile_k(s.segment), to, [&](int row, int column, __m512i* out) {
        const __m512i word = load_words(s, row, column);
        for (int j = 0; j < 4; ++j)
          _mm512_storeu_si512(out + j, code_pairs(word, j, table));
      });
    }
    return to;
  }

 private:
  __m512i tables_[parts];
};

// Decodes codes of 8 bits, or codes in two planes, whose joined bytes are first the even k, then the odd k.
template <Codes codes>
class ByteCodes {
 public:
  static constexpr int ahead_rows = 8;
  static constexpr int parts = 1;
  static constexpr bool scaled = false;

  explicit ByteCodes(const float* values) : pairs_(values) {}

  [[gnu::always_inline]] __m512i* unpack(const Step& s, int k, int end, __m512i* to) const {
    return unpack_decoded(*this, s, k, end, tile_k(s.segment), to);
  }
  // Decodes 8 k of 16 columns.
  [[gnu::always_inline]] void decode(const Step& s, int row, int column, __m512i (&pairs)[4]) const {
    if constexpr (codes == Codes::planes) {
      const HighWords<Avx512> high(s.high, 8 * row, column);
      const __m512i word = load_words(s, row, column);
      pairs_.pairs(high.template bytes<0>(word), pairs[0], pairs[2]);
      pairs_.pairs(high.template bytes<1>(word), pairs[1], pairs[3]);
    } else {
      for (int word = 0; word < 2; ++word)
        pairs_.pairs(load_words(s, 2 * row + word, column), pairs[2 * word], pairs[2 * word + 1]);
    }
  }

 private:
  BytePairs<codes> pairs_;
};

// Decodes weights with their scales and zeros in fp32, and rounds them to bf16. A whole chunk is one segment.
template <Codes codes>
class Rounded {
 public:
  static constexpr int ahead_rows = 32;
  static constexpr int parts = 1;
  static constexpr bool scaled = true;

  explicit Rounded(const float* values) : codes_(values) {}

  // Decodes 8 k of 16 columns.
  [[gnu::always_inline]] void decode(const Step& s, int row, int column, __m512i (&pairs)[4]) const {
    const int64_t at = 8 * row / s.segment * s.ld_scales + column;
    const __m512 scale = _mm512_loadu_ps(s.scales + at);
    __m512 offset = s.role == ZerosRole::none ? _mm512_setzero_ps() : _mm512_loadu_ps(s.zeros + at);
    if (s.role == ZerosRole::zero_point) offset = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(offset, scale));
    const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto join = [&](int j, __m512 low, __m512 high) __attribute__((always_inline)) {
      const auto both =
          (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, scale, offset), _mm512_fmadd_ps(low, scale, offset));
      pairs[j] = _mm512_permutexvar_epi16(alternate, both);
    };
    if constexpr (codes == Codes::table) {
      const __m512i word = load_words(s, row, column);
      unroll<Avx512, 4>([&](auto j) __attribute__((always_inline)) {
        join(j, codes_.template decode<j>(word), codes_.template decode<j + 4>(word));
      });
    } else if constexpr (codes == Codes::byte) {
      for (int i = 0; i < 2; ++i) {
        const __m512i word = load_words(s, 2 * row + i, column);
        join(2 * i, codes_.template decode<0>(word), codes_.template decode<2>(word));
        join(2 * i + 1, codes_.template decode<1>(word), codes_.template decode<3>(word));
      }
    } else {
      codes_.decode(s, row, column, pairs);
      for (int j = 0; j < 4; ++j) {
        const __m512i upper = _mm512_and_si512(pairs[j], _mm512_set1_epi32(static_cast<int>(0xFFFF0000U)));
        join(j, _mm512_castsi512_ps(_mm512_slli_epi32(pairs[j], 16)), _mm512_castsi512_ps(upper));
      }
    }
  }
  [[gnu::always_inline]] __m512i* unpack(const Step& s, int k, int end, __m512i* to) const {
    return unpack_decoded(*this, s, k, end, tile_k(kChunk), to);
  }

 private:
  static constexpr bool to_fp32 = codes == Codes::table || codes == Codes::byte;
  std::conditional_t<to_fp32, Avx512::Decoder<codes>, ByteCodes<codes>> codes_;
};

// Decodes codes with Decoded, and multiplies them by the scale of their group. The product is exact in bf16: an E2M1
// code has two significant bits, an E4M3 code or scale has four, and an E8M0 scale has one. A whole chunk is one
// segment. Decoding and scaling takes more instructions than decoding alone, so the next panel is always decoded
// between the tile products of the previous one. This was 1.04 to 1.25 times as fast at any number of rows (Intel
// Xeon).
template <class Decoded>
class Scaled {
 public:
  static constexpr int ahead_rows = 32;
  static constexpr int parts = 1;
  static constexpr bool scaled = true;

  explicit Scaled(const float* values) : decoded_(values) {}

  [[gnu::always_inline]] __m512i* unpack(const Step& s, int k, int end, __m512i* to) const {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
    return each_word(k, end, tile_k(kChunk), to, [&](int row, int column, __m512i* out) {
      const __m512 scale = _mm512_loadu_ps(s.scales + 8 * row / s.segment * s.ld_scales + column);
      __m512i pairs[4];
      decoded_.decode(s, row, column, pairs);
      for (int j = 0; j < 4; ++j) {
        const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs[j], 16)), scale);
        const __m512 high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs[j], upper)), scale);
        const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
        _mm512_storeu_si512(out + j, _mm512_mask_blend_epi16(0xAAAAAAAA, low_bits, _mm512_castps_si512(high)));
      }
    });
  }

 private:
  Decoded decoded_;
};

}  // namespace

}  // namespace marlin::cpu
