// The tensors of a packed weight, and the decode of a group's scales and zero points.
#pragma once

#include "kernels/gemm/decode.h"

namespace marlin {

// Decodes an E4M3 code through half. The exponent and mantissa of the code are shifted into the same fields of a half.
// The exponent bias of E4M3 is 7 and that of half is 15, so the half is the code's value times 2^-8. A multiplication
// by 256 = 2^8 corrects this.
MARLIN_INLINE float e4m3_value(uint code) {
  const half value = as_type<half>(ushort(((code & 0x80u) << 8) | ((code & 0x7Fu) << 7))) * 256.0h;
  return (code & 0x7Fu) == 0x7Fu ? NAN : float(value);
}

// Decodes four E4M3 scales as two half2 and multiplies them by global_scale. As in e4m3_value(), the halves are the
// scales times 2^-8. To correct this, global_scale is multiplied by 2^8: a power of two does not change the rounding of
// the product. The NaN codes 0x7F and 0xFF become the halves 1.875 and -1.875.
MARLIN_INLINE float4 e4m3_products(uchar4 codes, float4 global_scale) {
  const uint bits = as_type<uint>(codes);
  const half2 even = as_type<half2>(((bits & 0x00800080u) << 8) | ((bits & 0x007F007Fu) << 7));
  const half2 odd = as_type<half2>((bits & 0x80008000u) | ((bits & 0x7F007F00u) >> 1));
  const half4 values = half4(even.x, odd.x, even.y, odd.y);
  float4 result;
  MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
    result[c] = abs(values[c]) == 1.875h ? NAN : float(values[c]) * (256.0f * global_scale[c]);
  }
  return result;
}

// Returns 2^(code - 127), or NaN for code 255. The operators do not support other codes outside 16..240
// (docs/use/operators.md).
MARLIN_INLINE float e8m0_value(uint code) {
  return code == 0xFFu ? NAN : as_type<float>(code << 23);
}

// Returns true if half represents q - zero exactly, that is, for a fixed offset and for integer zero points.
template <WeightFormat format>
MARLIN_INLINE bool zero_is_in_code() {
  return subtracts_zero(format) && (zeros_role(format) == ZerosRole::none || zeros_type == int(ElementType::uint8));
}

// Returns true if `type` is a type of codes. `type` may be a function constant.
MARLIN_INLINE bool holds_codes(int type) {
  return type == int(ElementType::uint8) || type == int(ElementType::int8);
}

// Returns true if scales have two levels: codes that are multiplied by super_scales.
template <WeightFormat format>
MARLIN_INLINE bool has_super_scales() {
  return !has_coded_scales(format) && holds_codes(scales_type);
}

// Returns true if one scale stands for a block of weights.
template <WeightFormat format>
MARLIN_INLINE bool has_block_scales() {
  return takes_block_scales(format) && block_scales;
}

// Returns true if biases have two levels.
template <WeightFormat format>
MARLIN_INLINE bool has_super_zeros() {
  return zeros_role(format) == ZerosRole::bias && holds_codes(zeros_type);
}

// Loads four adjacent columns, with one load if vector_columns permits. Only the first `owned` columns exist. The other
// columns are not read and become zero.
template <typename T>
MARLIN_INLINE vec<T, 4> load_columns(const device T* first, uint owned) {
  vec<T, 4> result = vec<T, 4>(T(0));
  if (vector_columns) {
    if (!ragged_n || owned != 0) result = *reinterpret_cast<const device vec<T, 4>*>(first);
    return result;
  }
  MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
    if (!ragged_n || c < owned) result[c] = first[c];
  }
  return result;
}

template <typename T>
MARLIN_INLINE float4 load_columns_as_float(const device uchar* data, ulong index, uint owned) {
  const vec<T, 4> values = load_columns(reinterpret_cast<const device T*>(data) + index, owned);
  return float4(float(values[0]), float(values[1]), float(values[2]), float(values[3]));
}

MARLIN_INLINE float4 load_columns_of(int type, const device uchar* data, ulong index, uint owned) {
  if (type == int(ElementType::float16)) return load_columns_as_float<half>(data, index, owned);
  if (type == int(ElementType::bfloat16)) return load_columns_as_float<bfloat>(data, index, owned);
  if (type == int(ElementType::float32)) return load_columns_as_float<float>(data, index, owned);
  if (type == int(ElementType::int8)) return load_columns_as_float<char>(data, index, owned);
  return load_columns_as_float<uchar>(data, index, owned);
}

// Returns the first bit of the block at k in a word of the second plane.
template <WeightFormat format>
MARLIN_INLINE uint high_shift_of(uint k) {
  return high_shift(high_bits(format), k / kBlockK);
}

struct Weight {
  const device uint* packed;
  const device uint* high;
  const device uchar* scales;
  const device uchar* zeros;
  const device float* global_scale;
  const device uchar* super_scales;
  const device uchar* super_zeros;
  uint N;
  uint group_size;

  // Returns the words of rows k to k + 7 of column n. k is a multiple of 8.
  template <WeightFormat format>
  MARLIN_INLINE BlockWords<format> block(uint k, uint n) const thread {
    BlockWords<format> words;
    MARLIN_UNROLL for (uint i = 0; i < words_per_block(format); ++i) {
      words.word[i] = packed[ulong(k / codes_per_word(format) + i) * N + n];
    }
    words.high = has_high_plane(format) ? high[high_index<format>(k) + n] >> high_shift_of<format>(k) : 0;
    return words;
  }

  // Returns the index, for column 0, of the second plane's word that contains k.
  template <WeightFormat format>
  MARLIN_INLINE ulong high_index(uint k) const thread {
    return ulong(k / k_per_high_word(high_bits(format))) * N;
  }

  // Returns the index of the second-level scale at (k, n).
  MARLIN_INLINE ulong super_index(uint k, uint n) const thread { return ulong(k / kSuperBlock) * N + n; }

  template <WeightFormat format>
  MARLIN_INLINE float scale(uint k, uint n) const thread {
    const ulong index = ulong(k / group_size) * N + n;
    if (scale_coding(format) == ScaleCoding::e8m0) return e8m0_value(scales[index]);
    if (scale_coding(format) == ScaleCoding::e4m3) {
      const float value = e4m3_value(scales[index]);
      return has_global_scale ? value * global_scale[global_scale_per_column ? n : 0] : value;
    }
    const float value = load_element(scales, has_block_scales<format>() ? index / kScaleBlock : index, scales_type);
    return has_super_scales<format>() ? value * load_element(super_scales, super_index(k, n), super_type) : value;
  }

  // Loads the scales of columns n to n + 3 at k, where index = group * N + n. Columns at N and beyond are 0.
  template <WeightFormat format>
  MARLIN_INLINE float4 scales_of_columns(ulong index, uint k, uint n) const thread {
    if (has_block_scales<format>()) return float4(load_element(scales, index / kScaleBlock, scales_type));
    if (!has_coded_scales(format)) {
      const float4 values = load_columns_of(scales_type, scales, index, N - n);
      if (!has_super_scales<format>()) return values;
      return values * load_columns_of(super_type, super_scales, super_index(k, n), N - n);
    }
    const uchar4 codes = load_columns(scales + index, N - n);
    float4 factors = float4(1.0f);
    if (scale_coding(format) == ScaleCoding::e8m0) {
      MARLIN_UNROLL for (uint c = 0; c < 4; ++c) factors[c] = e8m0_value(codes[c]);
      return factors;
    }
    if (has_global_scale) {
      MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
        factors[c] = global_scale[global_scale_per_column ? min(n + c, N - 1) : 0];
      }
    }
    return e4m3_products(codes, factors);
  }

  template <WeightFormat format>
  MARLIN_INLINE float4 zeros_of_columns(ulong index, uint k, uint n) const thread {
    if (zeros_role(format) == ZerosRole::none) return float4(float(fixed_offset(format)));
    const float4 values = load_columns_of(zeros_type, zeros, index, N - n);
    if (!has_super_zeros<format>()) return values;
    return values * load_columns_of(super_type, super_zeros, super_index(k, n), N - n);
  }

  // Returns the zero point or the fixed offset in units of the code, or the bias. Returns 0 for formats without these.
  template <WeightFormat format>
  MARLIN_INLINE float zero(uint k, uint n) const thread {
    if (zeros_role(format) == ZerosRole::none) return float(fixed_offset(format));
    const float value = load_element(zeros, ulong(k / group_size) * N + n, zeros_type);
    return has_super_zeros<format>() ? value * load_element(super_zeros, super_index(k, n), super_type) : value;
  }

  // Returns the weights of rows k to k + 7 of column n, computed in fp32. k is a multiple of 8.
  template <WeightFormat format>
  MARLIN_INLINE Vec8<float> decoded(const device float* lut, uint k, uint n) const thread {
#pragma clang fp contract(off)  // no fma, because a bias is added to the rounded product
    const float column_scale = scale<format>(k, n);
    const float column_zero = zero<format>(k, n);
    const half zero_in_code = zero_is_in_code<format>() ? half(column_zero) : 0.0h;
    const Vec8<half> codes = exact_codes<format>(block<format>(k, n), zero_in_code);
    Vec8<float> result;
    MARLIN_UNROLL for (uint i = 0; i < kBlockK; ++i) {
      const float code = float(codes.k[i]);
      const float product = code * column_scale;
      result.k[i] = has_lut(format)                         ? lut[uint(code)] * column_scale
                    : zeros_role(format) == ZerosRole::bias ? product + column_zero
                    : zero_is_in_code<format>()             ? product
                                                            : (code - column_zero) * column_scale;
    }
    return result;
  }
};

// Returns the contribution of one group to an output, from the sum of code * x and the sum of x over the group's k.
template <WeightFormat format>
MARLIN_INLINE float apply_group(float codes, float x, float scale, float zero) {
  if (zeros_role(format) == ZerosRole::bias) return fma(codes, scale, zero * x);
  if (subtracts_zero(format)) return fma(-zero, x, codes) * scale;
  return codes * scale;
}

}  // namespace marlin
