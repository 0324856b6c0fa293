// moe_gemm_gated for MPS: one dispatch if there are few rows, otherwise those of moe_gemm and gated_activation.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "csrc/layer/gated_experts.h"
#include "csrc/mps/experts.h"

namespace marlin::mps {
namespace {

Tensor moe_gemm_gated_mps(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                          const OptionalTensor& bias, std::string_view activation, bool interleaved,
                          std::optional<double> limit, std::optional<double> alpha) {
  const auto [shape, kind] = check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
  const MoeGate gate{.activation = static_cast<int32_t>(kind),
                     .interleaved = interleaved,
                     .limit = static_cast<float>(limit.value_or(0)),
                     .alpha = static_cast<float>(alpha.value_or(0))};
  if (auto gated = moe_gemm_gated(a, weight, shape, expert_ids, bias, gate)) return *gated;
  return moe_gemm_then_activation(a, weight, expert_ids, bias, activation, interleaved, limit, alpha);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("moe_gemm_gated", weight_kernel<moe_gemm_gated_mps>);
}

}  // namespace marlin::mps
