// Handles to call gemm, gemm_fp32 and gemm_transposed through PyTorch's dispatcher.
#pragma once

#include "csrc/core/weight_arguments.h"

namespace marlin {

using GemmSignature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                             std::string_view variant, OptionalText activations);
using GemmFp32Signature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                                 OptionalText activations);
using GemmTransposedSignature = Tensor(const Tensor& a, const WeightArguments& weight);

// Returns the largest number of bytes of one temporary fp32 or bf16 copy in the computation of a gradient. The
// environment variable TORCH_MARLIN_METAL_GRADIENT_BYTES sets this limit.
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
