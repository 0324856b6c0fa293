// The shape and dtype rules of gemm and gemm_transposed. All backends and the fake kernels share these rules.
#pragma once

#include "csrc/weights/argument_rules.h"

namespace marlin {

// Each function calls fail() for the first invalid argument.
WeightShape check_gemm(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                       std::string_view variant, OptionalText activations, const char* op = "gemm");
WeightShape check_gemm_transposed(const Tensor& a, const WeightArguments& weight);

}  // namespace marlin
