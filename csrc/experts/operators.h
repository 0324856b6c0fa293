// Handles to call moe_gemm and its gradient through PyTorch's dispatcher.
#pragma once

#include "csrc/core/weight_arguments.h"

namespace marlin {

using MoeGemmSignature = Tensor(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                                std::string_view variant);
using MoeGemmGradSignature = Tensor(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids);

inline const auto& moe_gemm_op() {
  static const WeightOperator<MoeGemmSignature> op("torch_marlin_metal::moe_gemm");
  return op;
}

inline const auto& moe_gemm_grad_a_op() {
  static const WeightOperator<MoeGemmGradSignature> op("torch_marlin_metal::moe_gemm_grad_a");
  return op;
}

}  // namespace marlin
