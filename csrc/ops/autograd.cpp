// The derivatives of gemm with respect to a and bias and of gemm_transposed with respect to a, and autocast for gemm.
// All other arguments of these two operators, and all arguments of dequantize and embedding, refuse tensors that
// require grad.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "csrc/ops/argument_rules.h"
#include "csrc/ops/operators.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor optional(const torch::autograd::Variable& saved) {
  return saved.defined() ? OptionalTensor(saved) : std::nullopt;
}

// Saves a weight's tensors for the backward pass, which multiplies with them. The weight itself has no derivative.
void save_weight(AutogradContext* ctx, const WeightTensors& weight) {
  ctx->save_for_backward({weight.b_packed, weight.scales, weight.zeros.value_or(Tensor()),
                          weight.global_scale.value_or(Tensor()), weight.lut.value_or(Tensor()),
                          weight.perm.value_or(Tensor())});
  ctx->saved_data["weight_format"] = std::string(weight.weight_format);
  ctx->saved_data["group_size"] = weight.group_size;
}

// Returns the gradient of the bias: the sum of all rows of `grad`, computed in fp32. Converts some columns at a time,
// so that the fp32 copy stays small. While a compiler traces, the sum is one operation instead: the number of parts
// would depend on the sizes, and a compiled sum makes no fp32 copy.
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

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b_packed, const Tensor& scales,
                        const std::string& weight_format, int64_t group_size, const OptionalTensor& zeros,
                        const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                        const OptionalTensor& bias, const std::string& variant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_weight(ctx, {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
    if (bias && bias->requires_grad()) ctx->saved_data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    return gemm_op().call(a, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm, bias,
                          variant);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    variable_list result(11);
    if (ctx->needs_input_grad(0)) {
      const auto saved = ctx->get_saved_variables();
      result[0] = gemm_transposed_op().call(grad, saved[0], saved[1], ctx->saved_data["weight_format"].toStringRef(),
                                            ctx->saved_data["group_size"].toInt(), optional(saved[2]),
                                            optional(saved[3]), optional(saved[4]), optional(saved[5]));
    }
    if (ctx->saved_data.count("bias_dtype") != 0) {
      const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["bias_dtype"].toInt());
      result[9] = bias_gradient(grad, dtype);
    }
    return result;
  }
};

class GemmTransposedFunction : public torch::autograd::Function<GemmTransposedFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b_packed, const Tensor& scales,
                        const std::string& weight_format, int64_t group_size, const OptionalTensor& zeros,
                        const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_weight(ctx, {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
    return gemm_transposed_op().call(a, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(9);
    result[0] = gemm_op().call(grads[0], saved[0], saved[1], ctx->saved_data["weight_format"].toStringRef(),
                               ctx->saved_data["group_size"].toInt(), optional(saved[2]), optional(saved[3]),
                               optional(saved[4]), optional(saved[5]), std::nullopt, "auto");
    return result;
  }
};

Tensor gemm_autograd(const Tensor& a, const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format,
                     int64_t group_size, const OptionalTensor& zeros, const OptionalTensor& global_scale,
                     const OptionalTensor& lut, const OptionalTensor& perm, const OptionalTensor& bias,
                     c10::string_view variant) {
  check_weight_no_grad("gemm", {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
  check_no_tangent("gemm", "a", a);
  if (bias) check_no_tangent("gemm", "bias", *bias);
  const bool differentiate =
      c10::GradMode::is_enabled() && (a.requires_grad() || (bias.has_value() && bias->requires_grad()));
  if (differentiate) {
    return GemmFunction::apply(a, b_packed, scales, std::string(weight_format), group_size, zeros, global_scale, lut,
                               perm, bias, std::string(variant));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return gemm_op().call(a, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm, bias, variant);
}

Tensor gemm_transposed_autograd(const Tensor& a, const Tensor& b_packed, const Tensor& scales,
                                c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                                const OptionalTensor& global_scale, const OptionalTensor& lut,
                                const OptionalTensor& perm) {
  check_weight_no_grad("gemm_transposed",
                       {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
  check_no_tangent("gemm_transposed", "a", a);
  if (c10::GradMode::is_enabled() && a.requires_grad()) {
    return GemmTransposedFunction::apply(a, b_packed, scales, std::string(weight_format), group_size, zeros,
                                         global_scale, lut, perm);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return gemm_transposed_op().call(a, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm);
}

Tensor dequantize_autograd(const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format,
                           int64_t group_size, const OptionalTensor& zeros, const OptionalTensor& global_scale,
                           const OptionalTensor& lut, const OptionalTensor& perm, at::ScalarType dtype) {
  check_weight_no_grad("dequantize", {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
  at::AutoDispatchBelowADInplaceOrView guard;
  return dequantize_op().call(b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm, dtype);
}

Tensor embedding_autograd(const Tensor& ids, const Tensor& b_packed, const Tensor& scales,
                          c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                          const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                          at::ScalarType dtype) {
  check_weight_no_grad("embedding", {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
  at::AutoDispatchBelowADInplaceOrView guard;
  return embedding_op().call(ids, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm, dtype);
}

// Casts activations as autocast does for linear. The packed weight, scales and zeros keep their dtypes; the bias is
// added in fp32.
template <c10::DispatchKey kAutocastKey, c10::DeviceType kDevice>
Tensor gemm_autocast(const Tensor& a, const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format,
                     int64_t group_size, const OptionalTensor& zeros, const OptionalTensor& global_scale,
                     const OptionalTensor& lut, const OptionalTensor& perm, const OptionalTensor& bias,
                     c10::string_view variant) {
  c10::impl::ExcludeDispatchKeyGuard guard(kAutocastKey);
  const Tensor cast = at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), a, kDevice);
  return gemm_op().call(cast, b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm, bias,
                        variant);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("gemm", gemm_autograd);
  m.impl("gemm_transposed", gemm_transposed_autograd);
  m.impl("dequantize", dequantize_autograd);
  m.impl("embedding", embedding_autograd);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("gemm", gemm_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("gemm", gemm_autocast<c10::DispatchKey::AutocastMPS, c10::DeviceType::MPS>);
}

}  // namespace marlin
