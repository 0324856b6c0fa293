// The product of the tensor units that our kernels use, and the positions that we assume for a lane's elements.
#pragma once

// The header of MetalPerformancePrimitives depends on the declarations of the other two headers.
// clang-format off
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// clang-format on

// The header selects an older ABI if the deployment target is older than macOS 26.2. In that ABI, operands in registers
// have the layout of sums, and products are wrong without an error (mlx issue 3586). The header of macOS 26.2 itself
// does not define the macro.
#if defined(__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2) && !__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2
#error "tensor units: expected a deployment target of macOS 26.2 or later, got an older one"
#endif

#include "kernels/gemm/fragment.h"

namespace marlin {

// Returns the operation that adds the product of a 16 x 16 matrix and a transposed 32 x 16 matrix to 16 x 32 sums.
MARLIN_INLINE auto tensor_product() {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  return mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup>();
}

// A lane holds eight elements of a block of 16 x 16. Four adjacent elements are in row `row`, from column `column` on,
// and the other four are 8 rows below them. Apple does not document this layout. MLX's kernels for the M5 depend on it,
// and probe_tensor_layout compares it with the GPU's own functions.
MARLIN_INLINE LanePlace tensor_place(uint lane) {
  const uint quad = lane >> 2;
  return {(quad & 4u) | ((lane >> 1) & 3u), 4 * ((quad & 2u) | (lane & 1u))};
}

}  // namespace marlin
