// gemm_fp32 computes the product of gemm and returns it in fp32. This file implements it for all devices except the
// CPU, which has its own kernel.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/operators.h"

namespace marlin {
namespace {

// Converts the activations to fp32, because the GPU kernels write results in the dtype of the activations.
Tensor gemm_fp32(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, OptionalText activations) {
  check_gemm(a, weight, bias, "auto", activations, "gemm_fp32");
  return gemm_op().call(a.to(at::kFloat), weight, bias, "auto", activations);
}

Tensor gemm_fp32_autograd(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                          OptionalText activations) {
  const char* op = "gemm_fp32";
  check_weight_no_grad(op, weight, bias);
  check_no_grad(op, "a", a);
  check_no_tangent(op, "a", a);
  at::AutoDispatchBelowADInplaceOrView guard;
  return gemm_fp32_op().call(a, weight, bias, activations);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("gemm_fp32", weight_kernel<gemm_fp32>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("gemm_fp32", weight_kernel<gemm_fp32_autograd>);
}

}  // namespace marlin
