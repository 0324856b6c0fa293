// moe_gemm_gated for MPS: one dispatch if there are few rows, otherwise those of moe_gemm and gated_activation.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "csrc/layer/gated_experts.h"
#include "csrc/mps/experts.h"

namespace marlin::mps {
namespace {

Tensor moe_gemm_gated_mps(const Tensor& a, const Tensor& b_packed, const Tensor& scales, const Tensor& expert_ids,
                          c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                          const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                          const OptionalTensor& bias, c10::string_view activation, bool interleaved,
                          std::optional<double> limit, std::optional<double> alpha) {
  const WeightTensors weight{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const auto [shape, kind] = check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
  const MoeGate gate{.activation = static_cast<int32_t>(kind),
                     .interleaved = interleaved,
                     .limit = static_cast<float>(limit.value_or(0)),
                     .alpha = static_cast<float>(alpha.value_or(0))};
  if (auto gated = moe_gemm_gated(a, weight, shape, expert_ids, bias, gate)) return *gated;
  return moe_gemm_then_activation(a, b_packed, scales, expert_ids, weight_format, group_size, zeros, global_scale, lut,
                                  perm, bias, activation, interleaved, limit, alpha);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("moe_gemm_gated", moe_gemm_gated_mps);
}

}  // namespace marlin::mps
