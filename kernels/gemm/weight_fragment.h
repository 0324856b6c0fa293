// Weights for the matrix unit, decoded in registers from packed words to fp32 with scale and zero point in them: one
// instruction a weight. The operand is the transposed weight, rows n and columns k: in step j of four, columns 2p and
// 2p + 1 stand for k = j and j + 4 of word p, so that both elements of a lane come from one word, out of one mask.
#pragma once

#include "fragment.h"
#include "weight.h"

namespace marlin {

// One column's decode within a group.
template <WeightFormat format>
struct ColumnDecode {
  typedef FastCodes<code_kind(format)> Codes;

  float even_scale;
  float odd_scale;
  float offset;

  // The scale of odd codes is a register a column, and 32 rows leave none (M1: 227 half-registers with it, 207
  // without).
  static MARLIN_INLINE CodeForm form() { return {subnormal_codes, rows_per_threadgroup < kFusedMaxRows}; }
  static constexpr bool has_zero() { return format == WeightFormat::uint4b8 || format == WeightFormat::uint4; }
  // zero * scale has at most 11 + 11 significant bits unless one of them is fp32: then zero is taken off first.
  static MARLIN_INLINE bool offset_is_exact() {
    return format == WeightFormat::uint4b8 ||
           (scales_type != int(ElementType::float32) && zeros_type != int(ElementType::float32));
  }

  MARLIN_INLINE void set(float scale, float zero) {
    if (has_zero() && !offset_is_exact()) {
      even_scale = odd_scale = scale;
      offset = -zero;
    } else {
      even_scale = scale * Codes::even_unit(form());
      odd_scale = scale * Codes::odd_unit(form());
      offset = format == WeightFormat::uint4_bias ? zero : -zero * scale;
    }
  }

  // k is of the word.
  MARLIN_INLINE float weight(float code, uint k) const {
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
