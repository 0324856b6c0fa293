// Converts the tensors of a weight to the plain pointers that the CPU kernels use.
#pragma once

#include <algorithm>
#include <vector>

#include "csrc/core/tensor_views.h"
#include "csrc/weights/argument_rules.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

// Owns the contiguous tensors of a weight during a kernel call. Copies only the inputs that are not contiguous.
struct StoredWeight {
  Tensor b_packed, scales, zeros, super_scales, super_zeros, global_scale, lut, perm, b_high;
  PackedWeight view;  // describes the weight, or expert 0 if there are several experts
  int64_t experts;

  StoredWeight(const WeightArguments& weight, const WeightShape& shape)
      : b_packed(weight.b_packed),
        scales(weight.scales.contiguous()),
        zeros(contiguous_or_undefined(weight.zeros)),
        super_scales(contiguous_or_undefined(weight.super_scales)),
        super_zeros(contiguous_or_undefined(weight.super_zeros)),
        global_scale(contiguous_or_undefined(weight.global_scale)),
        lut(contiguous_or_undefined(weight.lut)),
        perm(contiguous_or_undefined(weight.perm)),
        b_high(contiguous_or_undefined(weight.b_high)) {
    view.format = shape.format;
    view.K = shape.K.expect_int();
    view.N = shape.N.expect_int();
    view.group_size = weight.group_size;
    view.words = static_cast<const uint32_t*>(b_packed.const_data_ptr());
    view.high = b_high.defined() ? static_cast<const uint32_t*>(b_high.const_data_ptr()) : nullptr;
    view.scales = scales.const_data_ptr();
    view.block_scales = shape.block_scales;
    view.scales_type = element_type(scales);
    view.zeros = zeros.defined() ? zeros.const_data_ptr() : nullptr;
    view.zeros_type = zeros.defined() ? element_type(zeros) : ElementType::float32;
    view.super_scales = super_scales.defined() ? super_scales.const_data_ptr() : nullptr;
    view.super_zeros = super_zeros.defined() ? super_zeros.const_data_ptr() : nullptr;
    view.super_type = super_scales.defined() ? element_type(super_scales) : ElementType::float32;
    view.global_scale = global_scale.defined() ? global_scale.const_data_ptr<float>() : nullptr;
    experts = shape.E.expect_int();
    view.global_scale_stride = global_scale.defined() && global_scale.numel() > experts ? 1 : 0;
    view.lut = lut.defined() ? lut.const_data_ptr<float>() : nullptr;
  }

  const int32_t* perm_data(const char* op) const {
    check_perm(op);
    return perm.defined() ? perm.const_data_ptr<int32_t>() : nullptr;
  }

  void check_perm(const char* op) const {
    if (perm.defined()) check_perm_range(op, perm.const_data_ptr<int32_t>(), perm.numel());
  }

  static bool repeats(const int32_t* perm, int64_t K) {
    std::vector<bool> seen(perm == nullptr ? 0 : static_cast<size_t>(K));
    return !std::all_of(perm, perm + seen.size(), [&](int32_t k) {
      const bool first = !seen[static_cast<size_t>(k)];
      seen[static_cast<size_t>(k)] = true;
      return first;
    });
  }

  // Checks that all indices are in range, because the kernels would read outside the tensor otherwise. Repeated indices
  // are permitted.
  static void check_perm_range(const char* op, const int32_t* perm, int64_t K) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < K; ++k)
      largest = std::max(largest, static_cast<uint32_t>(perm[k]));
    TORCH_CHECK_INDEX(largest < static_cast<uint64_t>(K), "torch_marlin_metal::", op,
                      ": perm: expected indices in [0, K) with K = ", K, ", got ", static_cast<int32_t>(largest));
  }
};

}  // namespace marlin::cpu
