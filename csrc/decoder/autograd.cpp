// The derivatives of the decoder layer's operators (norms, rotary, gated activation, cache). Backward passes compute in
// fp32 with PyTorch's operators. The backward pass of rotary is an exception: it calls rotary with the transposed
// matrix.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <tuple>

#include "csrc/decoder/argument_rules.h"
#include "csrc/decoder/operators.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using NormSignature = Tensor(const Tensor&, const Tensor&, double, double);
using AddNormSignature = TwoTensors(const Tensor&, const Tensor&, const Tensor&, double, double);
using RotarySignature = TwoTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool, bool);
using WriteCacheSignature = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);

const auto& norm_op() {
  static const auto op = find_operator<NormSignature>("torch_marlin_metal::rms_norm");
  return op;
}

const auto& add_norm_op() {
  static const auto op = find_operator<AddNormSignature>("torch_marlin_metal::add_rms_norm");
  return op;
}

const auto& rotary_op() {
  static const auto op = find_operator<RotarySignature>("torch_marlin_metal::rotary");
  return op;
}

const auto& write_cache_op() {
  static const auto op = find_operator<WriteCacheSignature>("torch_marlin_metal::write_cache");
  return op;
}

bool any_requires_grad(at::TensorList tensors) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.requires_grad()) return true;
  return false;
}

// Returns the gradients of a norm's input and weight, both in fp32.
TwoTensors norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, double eps, double offset) {
  const Tensor values = x.to(at::kFloat);
  const Tensor factor = at::rsqrt(values.square().mean(-1, /*keepdim=*/true) + eps);
  const Tensor normed = values * factor;
  const Tensor wide = grad.to(at::kFloat);
  const Tensor inner = wide * (weight.to(at::kFloat) + offset);
  const Tensor by_x = factor * (inner - normed * (inner * normed).mean(-1, /*keepdim=*/true));
  Tensor by_weight = wide * normed;
  if (by_weight.dim() > 1) by_weight = by_weight.flatten(0, -2).sum(0);
  return {by_x, by_weight};
}

class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps, double offset) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["offset"] = offset;
    return norm_op().call(x, weight, eps, offset);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [by_x, by_weight] = norm_backward(grads[0], saved[0], saved[1], ctx->saved_data["eps"].toDouble(),
                                                 ctx->saved_data["offset"].toDouble());
    return {by_x.to(saved[0].scalar_type()), by_weight.to(saved[1].scalar_type()), Tensor(), Tensor()};
  }
};

class AddNormFunction : public torch::autograd::Function<AddNormFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               double eps, double offset) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, sum] = add_norm_op().call(x, residual, weight, eps, offset);
    ctx->save_for_backward({sum, weight});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["offset"] = offset;
    return {y, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [by_sum, by_weight] = norm_backward(grads[0], saved[0], saved[1], ctx->saved_data["eps"].toDouble(),
                                                   ctx->saved_data["offset"].toDouble());
    const Tensor grad = (by_sum + grads[1].to(at::kFloat)).to(saved[0].scalar_type());
    return {grad, grad, by_weight.to(saved[1].scalar_type()), Tensor(), Tensor()};
  }
};

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos,
                               const Tensor& sin, bool interleaved, bool per_pair, bool transposed) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["per_pair"] = per_pair;
    ctx->saved_data["transposed"] = transposed;
    auto [rotated_q, rotated_k] = rotary_op().call(q, k, cos, sin, interleaved, per_pair, transposed);
    return {rotated_q, rotated_k};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [q, k] = rotary_op().call(grads[0], grads[1], saved[0], saved[1], ctx->saved_data["interleaved"].toBool(),
                                   ctx->saved_data["per_pair"].toBool(), !ctx->saved_data["transposed"].toBool());
    return {q, k, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

class ActivationFunction : public torch::autograd::Function<ActivationFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up, const std::string& activation,
                        std::optional<double> limit, std::optional<double> alpha) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    ctx->saved_data["activation"] = static_cast<int64_t>(check_gated_activation(gate, up, activation, limit, alpha));
    ctx->saved_data["limit"] = limit.value_or(0);
    ctx->saved_data["alpha"] = alpha.value_or(0);
    return activation_op().call(gate, up, activation, limit, alpha);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = grads[0].to(at::kFloat);
    const Tensor gate = saved[0].to(at::kFloat);
    const Tensor up = saved[1].to(at::kFloat);
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    Tensor by_gate;
    Tensor by_up;
    if (activation == Activation::silu) {
      by_gate = at::silu_backward(grad * up, gate);
      by_up = grad * at::silu(gate);
    } else if (activation == Activation::clamped_silu || activation == Activation::limited_silu) {
      const bool is_limited = activation == Activation::limited_silu;
      const double limit = ctx->saved_data["limit"].toDouble();
      const double alpha = is_limited ? 1 : ctx->saved_data["alpha"].toDouble();
      const Tensor g = gate.clamp_max(limit);
      const Tensor u = up.clamp(-limit, limit) + (is_limited ? 0 : 1);
      const Tensor share = at::sigmoid(alpha * g);
      by_gate = grad * u * share * (1 + alpha * g * (1 - share)) * gate.le(limit);
      by_up = grad * g * share * up.abs().le(limit);
    } else {
      const char* approximate = activation == Activation::gelu ? "none" : "tanh";
      by_gate = at::gelu_backward(grad * up, gate, approximate);
      by_up = grad * at::gelu(gate, approximate);
    }
    const at::ScalarType dtype = saved[0].scalar_type();
    return {by_gate.to(dtype), by_up.to(dtype), Tensor(), Tensor(), Tensor()};
  }
};

Tensor norm_autograd(const Tensor& x, const Tensor& weight, double eps, double offset) {
  check_no_tangent("rms_norm", "x", x);
  check_no_tangent("rms_norm", "weight", weight);
  if (any_requires_grad({x, weight})) return NormFunction::apply(x, weight, eps, offset);
  at::AutoDispatchBelowADInplaceOrView guard;
  return norm_op().call(x, weight, eps, offset);
}

TwoTensors add_norm_autograd(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset) {
  check_no_tangent("add_rms_norm", "x", x);
  check_no_tangent("add_rms_norm", "residual", residual);
  check_no_tangent("add_rms_norm", "weight", weight);
  if (any_requires_grad({x, residual, weight})) {
    const variable_list out = AddNormFunction::apply(x, residual, weight, eps, offset);
    return {out[0], out[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return add_norm_op().call(x, residual, weight, eps, offset);
}

TwoTensors rotary_autograd(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved,
                           bool per_pair, bool transposed) {
  check_no_grad("rotary", "cos", cos);
  check_no_grad("rotary", "sin", sin);
  check_no_tangent("rotary", "q", q);
  check_no_tangent("rotary", "k", k);
  if (any_requires_grad({q, k})) {
    const variable_list out = RotaryFunction::apply(q, k, cos, sin, interleaved, per_pair, transposed);
    return {out[0], out[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return rotary_op().call(q, k, cos, sin, interleaved, per_pair, transposed);
}

Tensor activation_autograd(const Tensor& gate, const Tensor& up, std::string_view activation,
                           std::optional<double> limit, std::optional<double> alpha) {
  check_no_tangent("gated_activation", "gate", gate);
  check_no_tangent("gated_activation", "up", up);
  if (any_requires_grad({gate, up})) return ActivationFunction::apply(gate, up, std::string(activation), limit, alpha);
  at::AutoDispatchBelowADInplaceOrView guard;
  return activation_op().call(gate, up, activation, limit, alpha);
}

// The operator has no derivative, because no gradient flows through the memory of a cache.
void write_cache_autograd(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                          const Tensor& start) {
  const char* op = "write_cache";
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"keys", keys}, {"values", values}, {"k", k}, {"v", v}}) {
    check_no_grad(op, name, tensor);
    check_no_tangent(op, name, tensor);
  }
  at::AutoDispatchBelowAutograd guard;
  write_cache_op().call(keys, values, k, v, start);
}

// Increases the version counters of the written tensors, as PyTorch's in-place operators do.
void write_cache_in_place(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                          const Tensor& start) {
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    write_cache_op().call(keys, values, k, v, start);
  }
  torch::autograd::impl::bump_version(keys);
  torch::autograd::impl::bump_version(values);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, ADInplaceOrView, m) {
  m.impl("write_cache", write_cache_in_place);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("rms_norm", norm_autograd);
  m.impl("add_rms_norm", add_norm_autograd);
  m.impl("rotary", rotary_autograd);
  m.impl("gated_activation", activation_autograd);
  m.impl("write_cache", write_cache_autograd);
}

}  // namespace marlin
