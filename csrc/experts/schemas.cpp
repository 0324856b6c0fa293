// The schemas of moe_gemm and its gradient, and their fake (Meta) kernels. docs/use/operators.md lists shapes and
// dtypes. The schema of moe_gemm_gated is in gated.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "csrc/experts/argument_rules.h"

TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  using marlin::weight_schema;
  m.def(weight_schema(
      "moe_gemm(Tensor a, Weight weight, Tensor expert_ids, *, Tensor? bias=None, Tensor? row_weights=None, "
      "bool reduce=False, str variant=\"auto\") -> Tensor"));
  m.def(weight_schema("moe_gemm_grad_a(Tensor grad, Weight weight, Tensor expert_ids, *) -> Tensor"));
}

namespace marlin {
namespace {

Tensor moe_gemm_meta(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                     const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                     std::string_view variant) {
  const WeightShape shape = check_moe_gemm(a, weight, expert_ids, bias, row_weights, variant);
  c10::SymDimVector sizes{expert_ids.sym_size(0)};
  if (!reduce) sizes.push_back(expert_ids.sym_size(1));
  sizes.push_back(shape.N);
  return at::empty_symint(sizes, a.options());
}

Tensor moe_gemm_grad_a_meta(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids) {
  const WeightShape shape = check_moe_gemm_grad_a(grad, weight, expert_ids);
  return at::empty_symint({grad.sym_size(0), grad.sym_size(1), shape.K}, grad.options().dtype(at::kFloat));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("moe_gemm", weight_kernel<moe_gemm_meta>);
  m.impl("moe_gemm_grad_a", weight_kernel<moe_gemm_grad_a_meta>);
}

}  // namespace marlin
