// Handles of this package's operators, for code that calls one through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "csrc/ops/argument_rules.h"

namespace marlin {

using GemmSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, c10::string_view);
using GemmFp32Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t,
                                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                 const OptionalTensor&, const OptionalTensor&);
using GemmTransposedSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t,
                                       const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                       const OptionalTensor&);
using DequantizeSignature = Tensor(const Tensor&, const Tensor&, c10::string_view, int64_t, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, at::ScalarType);
using EmbeddingSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t,
                                  const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                  const OptionalTensor&, at::ScalarType);
using MoeGemmSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t,
                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
                                c10::string_view);
using MoeGemmGradSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::string_view,
                                    int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Returns the most bytes that one temporary copy in floats may take while a gradient is computed. The environment
// variable TORCH_MARLIN_METAL_GRADIENT_BYTES sets this limit.
int64_t gradient_bytes();

inline const auto& gemm_op() {
  static const auto op = find_operator<GemmSignature>("torch_marlin_metal::gemm");
  return op;
}

inline const auto& gemm_fp32_op() {
  static const auto op = find_operator<GemmFp32Signature>("torch_marlin_metal::gemm_fp32");
  return op;
}

inline const auto& gemm_transposed_op() {
  static const auto op = find_operator<GemmTransposedSignature>("torch_marlin_metal::gemm_transposed");
  return op;
}

inline const auto& dequantize_op() {
  static const auto op = find_operator<DequantizeSignature>("torch_marlin_metal::dequantize");
  return op;
}

inline const auto& embedding_op() {
  static const auto op = find_operator<EmbeddingSignature>("torch_marlin_metal::embedding");
  return op;
}

inline const auto& moe_gemm_op() {
  static const auto op = find_operator<MoeGemmSignature>("torch_marlin_metal::moe_gemm");
  return op;
}

inline const auto& moe_gemm_grad_a_op() {
  static const auto op = find_operator<MoeGemmGradSignature>("torch_marlin_metal::moe_gemm_grad_a");
  return op;
}

}  // namespace marlin
