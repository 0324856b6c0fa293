// Handles of this package's operators, for code that calls one through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "csrc/ops/weight_arguments.h"

namespace marlin {

using GemmSignature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                             std::string_view variant);
using GemmFp32Signature = Tensor(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias);
using GemmTransposedSignature = Tensor(const Tensor& a, const WeightArguments& weight);
using DequantizeSignature = Tensor(const WeightArguments& weight, at::ScalarType dtype);
using EmbeddingSignature = Tensor(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype);
using MoeGemmSignature = Tensor(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                                std::string_view variant);
using MoeGemmGradSignature = Tensor(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

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

inline const auto& dequantize_op() {
  static const WeightOperator<DequantizeSignature> op("torch_marlin_metal::dequantize");
  return op;
}

inline const auto& embedding_op() {
  static const WeightOperator<EmbeddingSignature> op("torch_marlin_metal::embedding");
  return op;
}

inline const auto& moe_gemm_op() {
  static const WeightOperator<MoeGemmSignature> op("torch_marlin_metal::moe_gemm");
  return op;
}

inline const auto& moe_gemm_grad_a_op() {
  static const WeightOperator<MoeGemmGradSignature> op("torch_marlin_metal::moe_gemm_grad_a");
  return op;
}

}  // namespace marlin
