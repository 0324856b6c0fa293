// The shape and dtype rules of the products with one packed weight, shared by all backends and the fake kernels.
#pragma once

#include "csrc/weights/argument_rules.h"

namespace marlin {

// Each calls fail() for the first wrong argument.
WeightShape check_gemm(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                       std::string_view variant, OptionalText activations, const char* op = "gemm");
WeightShape check_gemm_transposed(const Tensor& a, const WeightArguments& weight);

}  // namespace marlin
