// The derivatives of gemm with respect to `a` and `bias`, the derivative of gemm_transposed with respect to `a`, and
// autocast for gemm. If gemm rounds activations, its derivative ignores the rounding. Any other argument of the two
// operators that requires grad is an error.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "csrc/core/autocast.h"
#include "csrc/core/saved_weight.h"
#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/operators.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the gradient of the bias: the sum of all rows of `grad`, computed in fp32. Converts some columns at a time,
// so the fp32 copy stays small. While a compiler traces, the sum is a single operation: the number of parts would
// depend on the sizes, and a compiled sum makes no fp32 copy.
Tensor bias_gradient(const Tensor& grad, at::ScalarType dtype) {
  at::DimVector leading(std::max<int64_t>(grad.dim() - 1, 0));
  std::iota(leading.begin(), leading.end(), 0);
  if (leading.empty()) return grad.to(dtype);
  if (grad.scalar_type() == at::kFloat || grad.key_set().has(c10::DispatchKey::Python))
    return grad.to(at::kFloat).sum(leading).to(dtype);
  const int64_t N = grad.size(-1);
  const Tensor rows = grad.reshape({-1, N});
  Tensor out = at::empty({N}, grad.options().dtype(dtype));
  const int64_t fitting = gradient_bytes() / (4 * std::max<int64_t>(rows.size(0), 1));
  const int64_t width = std::clamp<int64_t>(fitting, 1, N);
  for (int64_t first = 0; first < N; first += width) {
    const int64_t count = std::min(width, N - first);
    out.narrow(0, first, count).copy_(rows.narrow(1, first, count).to(at::kFloat).sum(0));
  }
  return out;
}

class GemmFunction : public torch::autograd::Function<GemmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const WeightArguments& weight,
                        const OptionalTensor& bias, std::string_view variant, OptionalText activations) {
    at::AutoDispatchBelowADInplaceOrView guard;
    SavedWeight::save(ctx, weight);
    if (bias && bias->requires_grad()) ctx->saved_data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    return gemm_op().call(a, weight, bias, variant, activations);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    variable_list result(5);
    if (ctx->needs_input_grad(0)) {
      const SavedWeight saved = SavedWeight::load(ctx);
      result[0] = gemm_transposed_op().call(grad, saved.weight.arguments());
    }
    if (ctx->saved_data.count("bias_dtype") != 0) {
      const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["bias_dtype"].toInt());
      result[2] = bias_gradient(grad, dtype);
    }
    return result;
  }
};

class GemmTransposedFunction : public torch::autograd::Function<GemmTransposedFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const WeightArguments& weight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    SavedWeight::save(ctx, weight);
    return gemm_transposed_op().call(a, weight);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedWeight saved = SavedWeight::load(ctx);
    return {gemm_op().call(grads[0], saved.weight.arguments(), std::nullopt, "auto", std::nullopt), Tensor()};
  }
};

Tensor gemm_autograd(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                     std::string_view variant, OptionalText activations) {
  check_weight_no_grad("gemm", weight);
  check_no_tangent("gemm", "a", a);
  if (bias) check_no_tangent("gemm", "bias", *bias);
  const bool differentiate =
      c10::GradMode::is_enabled() && (a.requires_grad() || (bias.has_value() && bias->requires_grad()));
  if (differentiate) return GemmFunction::apply(a, weight, bias, variant, activations);
  at::AutoDispatchBelowADInplaceOrView guard;
  return gemm_op().call(a, weight, bias, variant, activations);
}

Tensor gemm_transposed_autograd(const Tensor& a, const WeightArguments& weight) {
  check_weight_no_grad("gemm_transposed", weight);
  check_no_tangent("gemm_transposed", "a", a);
  if (c10::GradMode::is_enabled() && a.requires_grad()) return GemmTransposedFunction::apply(a, weight);
  at::AutoDispatchBelowADInplaceOrView guard;
  return gemm_transposed_op().call(a, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("gemm", weight_kernel<gemm_autograd>);
  m.impl("gemm_transposed", weight_kernel<gemm_transposed_autograd>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("gemm", Autocast<GemmSignature>::cpu<gemm_op>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("gemm", Autocast<GemmSignature>::mps<gemm_op>);
}

}  // namespace marlin
