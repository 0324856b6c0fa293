#include "csrc/experts/gated.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "csrc/core/autocast.h"
#include "csrc/decoder/operators.h"
#include "csrc/experts/operators.h"

TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def(marlin::weight_schema(
      "moe_gemm_gated(Tensor a, Weight weight, Tensor expert_ids, *, Tensor? bias=None, str activation=\"silu\", "
      "bool interleaved=False, float? limit=None, float? alpha=None) -> Tensor"));
}

namespace marlin {
namespace {

constexpr const char* kName = "moe_gemm_gated";

using Signature = Tensor(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                         const OptionalTensor& bias, std::string_view activation, bool interleaved,
                         std::optional<double> limit, std::optional<double> alpha);

const auto& gated_op() {
  static const WeightOperator<Signature> op("torch_marlin_metal::moe_gemm_gated");
  return op;
}

Tensor moe_gemm_gated_meta(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                           const OptionalTensor& bias, std::string_view activation, bool, std::optional<double> limit,
                           std::optional<double> alpha) {
  const GatedProduct product = check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
  return at::empty_symint({expert_ids.sym_size(0), expert_ids.sym_size(1), product.shape.N / 2}, a.options());
}

Tensor moe_gemm_gated_cpu(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                          const OptionalTensor& bias, std::string_view activation, bool interleaved,
                          std::optional<double> limit, std::optional<double> alpha) {
  check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
  return moe_gemm_then_activation(a, weight, expert_ids, bias, activation, interleaved, limit, alpha);
}

// If a gradient is needed, calls moe_gemm and gated_activation, which have derivatives.
Tensor moe_gemm_gated_autograd(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                               const OptionalTensor& bias, std::string_view activation, bool interleaved,
                               std::optional<double> limit, std::optional<double> alpha) {
  check_weight_no_grad(kName, weight, bias);
  check_no_tangent(kName, "a", a);
  if (c10::GradMode::is_enabled() && a.requires_grad()) {
    check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
    return moe_gemm_then_activation(a, weight, expert_ids, bias, activation, interleaved, limit, alpha);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return gated_op().call(a, weight, expert_ids, bias, activation, interleaved, limit, alpha);
}

}  // namespace

GatedProduct check_moe_gemm_gated(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                  const OptionalTensor& bias, std::string_view activation, std::optional<double> limit,
                                  std::optional<double> alpha) {
  WeightShape shape = check_moe_gemm(a, weight, expert_ids, bias, std::nullopt, "auto", kName);
  if (shape.N % 2 != 0) {
    fail(kName, "b_packed", "int32 [E, rows, N] with an even N, for gate and up", describe(weight.b_packed));
  }
  return {shape, check_activation(kName, activation, limit, alpha)};
}

Tensor moe_gemm_then_activation(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                                const OptionalTensor& bias, std::string_view activation, bool interleaved,
                                std::optional<double> limit, std::optional<double> alpha) {
  const Tensor products = moe_gemm_op().call(a, weight, expert_ids, bias, std::nullopt, false, "auto");
  if (interleaved) {
    return activation_op().call(products.slice(-1, 0, std::nullopt, 2), products.slice(-1, 1, std::nullopt, 2),
                                activation, limit, alpha);
  }
  const c10::SymInt half = products.sym_size(-1) / 2;
  return activation_op().call(products.narrow_symint(-1, 0, half), products.narrow_symint(-1, half, half), activation,
                              limit, alpha);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("moe_gemm_gated", weight_kernel<moe_gemm_gated_cpu>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("moe_gemm_gated", weight_kernel<moe_gemm_gated_meta>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("moe_gemm_gated", weight_kernel<moe_gemm_gated_autograd>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("moe_gemm_gated", Autocast<Signature>::cpu<gated_op>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("moe_gemm_gated", Autocast<Signature>::mps<gated_op>);
}

}  // namespace marlin
