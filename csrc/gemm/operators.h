// Handles of the products with one packed weight, for code that calls one through the dispatcher.
#pragma once

#include "csrc/core/weight_arguments.h"

namespace marlin {

using GemmSignature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                             std::string_view variant, OptionalText activations);
using GemmFp32Signature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                                 OptionalText activations);
using GemmTransposedSignature = Tensor(const Tensor& a, const WeightArguments& weight);

// Returns the most bytes that one temporary copy in floats may take while a gradient is computed. The environment
// variable TORCH_MARLIN_METAL_GRADIENT_BYTES sets this limit.
int64_t gradient_bytes();

inline const auto& gemm_op() {
  static const WeightOperator<GemmSignature> op("torch_marlin_metal::gemm");
  return op;
}

inline const auto& gemm_fp32_op() {
  static const WeightOperator<GemmFp32Signature> op("torch_marlin_metal::gemm_fp32");
  return op;
}

inline const auto& gemm_transposed_op() {
  static const WeightOperator<GemmTransposedSignature> op("torch_marlin_metal::gemm_transposed");
  return op;
}

}  // namespace marlin
