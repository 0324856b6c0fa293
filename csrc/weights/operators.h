// Handles to call the operators that decode a packed weight through PyTorch's dispatcher.
#pragma once

#include "csrc/core/weight_arguments.h"

namespace marlin {

using DequantizeSignature = Tensor(const WeightArguments& weight, at::ScalarType dtype);
using EmbeddingSignature = Tensor(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype);

inline const auto& dequantize_op() {
  static const WeightOperator<DequantizeSignature> op("torch_marlin_metal::dequantize");
  return op;
}

inline const auto& embedding_op() {
  static const WeightOperator<EmbeddingSignature> op("torch_marlin_metal::embedding");
  return op;
}

}  // namespace marlin
