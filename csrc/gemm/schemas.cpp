// The schemas of gemm, gemm_fp32 and gemm_transposed, and their fake (Meta) kernels. This file defines the library; the
// other families of operators extend it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "csrc/gemm/argument_rules.h"

// docs/use/operators.md lists shapes and dtypes. Outputs are always new tensors.
TORCH_LIBRARY(torch_marlin_metal, m) {
  using marlin::weight_schema;
  m.def(weight_schema(
      "gemm(Tensor a, Weight weight, *, Tensor? bias=None, str variant=\"auto\", str? activations=None) -> "
      "Tensor"));
  m.def(weight_schema("gemm_fp32(Tensor a, Weight weight, *, Tensor? bias=None, str? activations=None) -> Tensor"));
  m.def(weight_schema("gemm_transposed(Tensor a, Weight weight, *) -> Tensor"));
}

namespace marlin {
namespace {

Tensor gemm_meta(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, std::string_view variant,
                 OptionalText activations) {
  const WeightShape shape = check_gemm(a, weight, bias, variant, activations);
  c10::SymDimVector sizes(a.sym_sizes());
  sizes.back() = shape.N;
  return at::empty_symint(sizes, a.options());
}

Tensor gemm_fp32_meta(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                      OptionalText activations) {
  const WeightShape shape = check_gemm(a, weight, bias, "auto", activations, "gemm_fp32");
  c10::SymDimVector sizes(a.sym_sizes());
  sizes.back() = shape.N;
  return at::empty_symint(sizes, a.options().dtype(at::kFloat));
}

Tensor gemm_transposed_meta(const Tensor& a, const WeightArguments& weight) {
  const WeightShape shape = check_gemm_transposed(a, weight);
  c10::SymDimVector sizes(a.sym_sizes());
  sizes.back() = shape.K;
  return at::empty_symint(sizes, a.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("gemm", weight_kernel<gemm_meta>);
  m.impl("gemm_fp32", weight_kernel<gemm_fp32_meta>);
  m.impl("gemm_transposed", weight_kernel<gemm_transposed_meta>);
}

}  // namespace marlin
