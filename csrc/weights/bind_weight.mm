#include "csrc/weights/bind_weight.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "csrc/core/tensor_views.h"

namespace marlin::mps {

bool is_aligned(const Tensor& tensor, int64_t elements) {
  return tensor.storage_offset() % elements == 0;
}

WeightProblem bind_weight(const char* op, const WeightArguments& weight, const WeightShape& shape, Bindings& bindings) {
  bindings[kSlotPacked] = weight.b_packed;
  bindings[kSlotHigh] = contiguous_or_undefined(weight.b_high);
  bindings[kSlotScales] = weight.scales.contiguous();
  bindings[kSlotZeros] = contiguous_or_undefined(weight.zeros);
  bindings[kSlotGlobalScale] = contiguous_or_undefined(weight.global_scale);
  bindings[kSlotLut] = contiguous_or_undefined(weight.lut);
  bindings[kSlotPerm] = contiguous_or_undefined(weight.perm);
  bindings[kSlotSuperScales] = contiguous_or_undefined(weight.super_scales);
  bindings[kSlotSuperZeros] = contiguous_or_undefined(weight.super_zeros);
  // Kernels may load four columns at once only if each tensor with columns starts at a multiple of four elements.
  const auto aligned = [&](BufferSlot slot) { return !bindings[slot].defined() || is_aligned(bindings[slot], 4); };
  const uint32_t K = checked_size(op, "K", shape.K.expect_int());
  return {.format = shape.format,
          .K = K,
          .N = checked_size(op, "N", shape.N.expect_int()),
          .group_size = static_cast<uint32_t>(std::min<int64_t>(weight.group_size, K)),
          .scales = element_type(weight.scales),
          .zeros = weight.zeros ? element_type(*weight.zeros) : ElementType::float16,
          .super = weight.super_scales ? element_type(*weight.super_scales) : ElementType::float16,
          .has_perm = weight.perm.has_value(),
          .has_global_scale = weight.global_scale.has_value(),
          .global_scale_per_column = weight.global_scale && weight.global_scale->numel() > shape.E.expect_int(),
          .vector_aligned = aligned(kSlotPacked) && aligned(kSlotScales) && aligned(kSlotZeros) &&
                            aligned(kSlotSuperScales) && aligned(kSlotSuperZeros) && aligned(kSlotHigh),
          .block_scales = shape.block_scales};
}

Tensor empty_weight(const WeightProblem& weight, const at::TensorOptions& options) {
  const std::array<int64_t, 2> sizes{weight.K, weight.N};
  return weight.has_perm ? at::zeros(sizes, options) : at::empty(sizes, options);
}

}  // namespace marlin::mps
