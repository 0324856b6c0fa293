// The products of tokens with the weights of their experts, on MPS.
#pragma once

#include <optional>

#include "csrc/ops/argument_rules.h"
#include "csrc/planner/problem.h"

namespace marlin::mps {

// Multiplies as moe_gemm does, and applies a gated activation. The arguments must be those of a checked moe_gemm.
// Returns [T, top_k, N / 2], or nothing if the activation needs a dispatch of its own.
std::optional<Tensor> moe_gemm_gated(const Tensor& a, const WeightArguments& weight, const WeightShape& shape,
                                     const Tensor& expert_ids, const OptionalTensor& bias, const MoeGate& gate);

}  // namespace marlin::mps
