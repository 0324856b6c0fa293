// The shape and dtype rules of moe_gemm and its gradient. All backends and the fake kernels share these rules.
#pragma once

#include "csrc/weights/argument_rules.h"

namespace marlin {

// Each function calls fail() for the first invalid argument. The weight's tensors have a leading dimension E.
WeightShape check_moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                           const OptionalTensor& bias, const OptionalTensor& row_weights, std::string_view variant,
                           const char* op = "moe_gemm");
WeightShape check_moe_gemm_grad_a(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids);

}  // namespace marlin
