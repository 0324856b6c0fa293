// Decodes packed words in registers to fp32 operands of the matrix unit. One instruction per weight applies scale and
// zero point. The operand is the transposed weight: its rows are n and its columns are k. The 32 k of a column are
// divided into four fragments. In fragment j, columns 2p and 2p + 1 are one pair of codes (decode.h), so one mask on
// one word gives both elements of a lane. For 4-bit codes, this is pair j of word p: k = 8p + j and 8p + j + 4. For
// 8-bit codes, it is a pair of word p if j < 2, and of word p + 4 otherwise. With i = j % 2, the pair of word p is k =
// 4p + i and 4p + i + 2, and the k of word p + 4 are 16 higher.
#pragma once

#include "kernels/gemm/fragment.h"
#include "kernels/gemm/weight.h"

namespace marlin {

// Decodes the codes of one column within a group. `fewer_rows` is true in a loop with fewer rows than kFusedMaxRows.
template <WeightFormat format, bool fewer_rows>
struct ColumnDecode {
  typedef FastCodesOf<format> Codes;

  float even_scale;
  float odd_scale;
  float offset;

  // With fewer than 32 rows, odd codes have a separate scale, which needs one more register per column. With 32 rows, a
  // thread would then need 227 half-registers instead of 207 (M1).
  static MARLIN_INLINE DecodeOptions form() {
    return {subnormal_codes, fewer_rows || rows_per_threadgroup < kFusedMaxRows};
  }
  // Returns true if zero * scale is exact in fp32. The product is exact for a fixed offset that is a power of two. It
  // is also exact if both factors are stored in at most 16 bits, because each then has at most 11 significant bits.
  // Otherwise the product may round. set() then stores the zero point itself, and weight() subtracts it before scaling.
  static MARLIN_INLINE bool offset_is_exact() {
    const bool short_scales = scales_type != int(ElementType::float32) && !has_super_scales<format>();
    if (zeros_role(format) != ZerosRole::none) return short_scales && zeros_type != int(ElementType::float32);
    const uint offset = fixed_offset(format);
    return (offset & (offset - 1)) == 0 || short_scales;
  }

  MARLIN_INLINE void set(float scale, float zero) thread {
    if (subtracts_zero(format) && !offset_is_exact()) {
      even_scale = odd_scale = scale;
      offset = -zero;
    } else {
      even_scale = scale * Codes::even_unit(form());
      odd_scale = scale * Codes::odd_unit(form());
      offset = zeros_role(format) == ZerosRole::bias ? zero : -zero * scale;
    }
  }

  // Returns the weight of a code; k is its position within the block, 0..7.
  MARLIN_INLINE float weight(float code, uint k) const thread {
    const bool odd = k % 2 == 1;
    const float scale = odd ? odd_scale : even_scale;
    if (subtracts_zero(format) && !offset_is_exact()) {
      return fma(code, odd ? Codes::odd_unit(form()) : Codes::even_unit(form()), offset) * scale;
    }
    if (subtracts_zero(format) || zeros_role(format) == ZerosRole::bias) return fma(code, scale, offset);
    return code * scale;
  }
};

}  // namespace marlin
