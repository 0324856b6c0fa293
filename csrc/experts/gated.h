// moe_gemm_gated: moe_gemm and gated_activation in one operator, for the gate and up projections of a mixture's
// experts.
#pragma once

#include "csrc/decoder/argument_rules.h"
#include "csrc/experts/argument_rules.h"

namespace marlin {

struct GatedProduct {
  WeightShape shape;
  Activation activation;
};

GatedProduct check_moe_gemm_gated(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                  const OptionalTensor& bias, std::string_view activation, std::optional<double> limit,
                                  std::optional<double> alpha);

Tensor moe_gemm_then_activation(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                const OptionalTensor& bias, std::string_view activation, bool interleaved,
                                std::optional<double> limit, std::optional<double> alpha);

}  // namespace marlin
