// Decodes packed words to fp32 operands of the matrix unit in registers, with scale and zero point applied: one
// instruction per weight. The operand is the transposed weight: rows are n, columns are k. In step j of four, columns
// 2p and 2p + 1 are k = j and j + 4 of word p: both elements of a lane come out of one word through one mask.
#pragma once

#include "kernels/gemm/fragment.h"
#include "kernels/gemm/weight.h"

namespace marlin {

// Decodes the codes of one column within a group.
template <WeightFormat format>
struct ColumnDecode {
  typedef FastCodes<code_kind(format)> Codes;

  float even_scale;
  float odd_scale;
  float offset;

  // A scale for odd codes costs a register per column, and 32 rows leave none free: 227 half-registers with it, 207
  // without (M1).
  static MARLIN_INLINE DecodeOptions form() { return {subnormal_codes, rows_per_threadgroup < kFusedMaxRows}; }
  static constexpr bool has_zero() { return format == WeightFormat::uint4b8 || format == WeightFormat::uint4; }
  // Returns true if zero * scale is exact in fp32: always for uint4b8, whose zero is 8, and otherwise if both have at
  // most 11 significant bits. If one of them is fp32 the product may round, so set() keeps zero apart and weight()
  // subtracts it before it scales.
  static MARLIN_INLINE bool offset_is_exact() {
    return format == WeightFormat::uint4b8 ||
           (scales_type != int(ElementType::float32) && zeros_type != int(ElementType::float32));
  }

  MARLIN_INLINE void set(float scale, float zero) thread {
    if (has_zero() && !offset_is_exact()) {
      even_scale = odd_scale = scale;
      offset = -zero;
    } else {
      even_scale = scale * Codes::even_unit(form());
      odd_scale = scale * Codes::odd_unit(form());
      offset = format == WeightFormat::uint4_bias ? zero : -zero * scale;
    }
  }

  // k counts within the word.
  MARLIN_INLINE float weight(float code, uint k) const thread {
    const bool odd = k % 2 == 1;
    const float scale = odd ? odd_scale : even_scale;
    if (has_zero() && !offset_is_exact()) {
      return fma(code, odd ? Codes::odd_unit(form()) : Codes::even_unit(form()), offset) * scale;
    }
    if (has_zero() || format == WeightFormat::uint4_bias) return fma(code, scale, offset);
    return code * scale;
  }
};

}  // namespace marlin
