// The derivatives of mlstm and mlstm_step, and autocast for mlstm. For mlstm_states and mlstm_output, an argument that
// requires grad is an error.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "csrc/mlstm/backward.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OutputSignature = ThreeTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                     const Tensor&, const Tensor&, const Tensor&, int64_t, double);
using MlstmSignature = FourTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                   double);
using StepSignature = FourTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, const Tensor&, double);
using BackwardSignature = MlstmGradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                         const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         int64_t, double);

const auto& output_op() {
  static const auto op = find_operator<OutputSignature>("torch_marlin_metal::mlstm_output");
  return op;
}

const auto& mlstm_op() {
  static const auto op = find_operator<MlstmSignature>("torch_marlin_metal::mlstm");
  return op;
}

const auto& step_op() {
  static const auto op = find_operator<StepSignature>("torch_marlin_metal::mlstm_step");
  return op;
}

const auto& backward_op() {
  static const auto op = find_operator<BackwardSignature>("torch_marlin_metal::_mlstm_backward");
  return op;
}

// An argument of an operator; `tensor` is nullptr if the caller omitted it.
struct Argument {
  const char* name;
  const Tensor* tensor;
};

const Tensor* pointer(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

bool any_requires_grad(std::initializer_list<Argument> arguments) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const Argument& argument : arguments) {
    if (argument.tensor != nullptr && argument.tensor->requires_grad()) return true;
  }
  return false;
}

void check_no_grad(const char* op, std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.tensor != nullptr) marlin::check_no_grad(op, argument.name, *argument.tensor);
  }
}

void check_no_tangent(const char* op, std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.tensor != nullptr) marlin::check_no_tangent(op, argument.name, *argument.tensor);
  }
}

Tensor defined(const OptionalTensor& tensor) {
  return tensor.value_or(Tensor());
}

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

class MlstmFunction : public torch::autograd::Function<MlstmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i,
                               const Tensor& f, const OptionalTensor& C0, const OptionalTensor& n0,
                               const OptionalTensor& m0, int64_t chunk_size, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, C, n, m] = mlstm_op().call(q, k, v, i, f, C0, n0, m0, chunk_size, eps);
    ctx->save_for_backward({q, k, v, i, f, defined(C0), defined(n0), defined(m0), h});
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->saved_data["eps"] = eps;
    return {h, C, n, m};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [q, k, v, i, f, C0, n0, m0] =
        backward_op().call(saved[0], saved[1], saved[2], saved[3], saved[4], optional(saved[5]), optional(saved[6]),
                           optional(saved[7]), saved[8], grads[0], grads[1], grads[2], grads[3],
                           ctx->saved_data["chunk_size"].toInt(), ctx->saved_data["eps"].toDouble());
    variable_list result{q, k, v, i, f, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    if (saved[5].defined()) {
      result[5] = C0;
      result[6] = n0;
      result[7] = m0;
    }
    return result;
  }
};

FourTensors mlstm_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                           const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                           int64_t chunk_size, double eps) {
  const std::initializer_list<Argument> arguments{{"q", &q},           {"k", &k},          {"v", &v},
                                                  {"i", &i},           {"f", &f},          {"C0", pointer(C0)},
                                                  {"n0", pointer(n0)}, {"m0", pointer(m0)}};
  check_no_tangent("mlstm", arguments);
  if (any_requires_grad(arguments)) {
    const variable_list out = MlstmFunction::apply(q, k, v, i, f, C0, n0, m0, chunk_size, eps);
    return {out[0], out[1], out[2], out[3]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return mlstm_op().call(q, k, v, i, f, C0, n0, m0, chunk_size, eps);
}

// If a gradient is needed, computes the token with mlstm, which has a derivative.
FourTensors step_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                          const Tensor& C, const Tensor& n, const Tensor& m, double eps) {
  const std::initializer_list<Argument> arguments{{"q", &q}, {"k", &k}, {"v", &v}, {"i", &i},
                                                  {"f", &f}, {"C", &C}, {"n", &n}, {"m", &m}};
  check_no_tangent("mlstm_step", arguments);
  if (any_requires_grad(arguments)) {
    check_mlstm_step(q, k, v, i, f, C, n, m, eps);
    auto [h, next_C, next_n, next_m] = mlstm_op().call(q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), i.unsqueeze(2),
                                                       f.unsqueeze(2), C, n, m, /*chunk_size=*/0, eps);
    return {h.squeeze(2), next_C, next_n, next_m};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return step_op().call(q, k, v, i, f, C, n, m, eps);
}

ThreeTensors states_autograd(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                             const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                             int64_t chunk_size, int64_t save_states_every) {
  check_no_grad(
      "mlstm_states",
      {{"k", &k}, {"v", &v}, {"i", &i}, {"f", &f}, {"C0", pointer(C0)}, {"n0", pointer(n0)}, {"m0", pointer(m0)}});
  at::AutoDispatchBelowADInplaceOrView guard;
  return mlstm_states_op().call(k, v, i, f, C0, n0, m0, chunk_size, save_states_every);
}

ThreeTensors output_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                             const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps) {
  check_no_grad("mlstm_output",
                {{"q", &q}, {"k", &k}, {"v", &v}, {"i", &i}, {"f", &f}, {"C", &C}, {"n", &n}, {"m", &m}});
  at::AutoDispatchBelowADInplaceOrView guard;
  return output_op().call(q, k, v, i, f, C, n, m, chunk_size, eps);
}

MlstmGradients backward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                                 const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                                 const Tensor& h, const Tensor& grad_h, const Tensor& grad_C, const Tensor& grad_n,
                                 const Tensor& grad_m, int64_t chunk_size, double eps) {
  TORCH_CHECK_VALUE(!any_requires_grad({{"q", &q},
                                        {"k", &k},
                                        {"v", &v},
                                        {"i", &i},
                                        {"f", &f},
                                        {"C0", pointer(C0)},
                                        {"n0", pointer(n0)},
                                        {"m0", pointer(m0)},
                                        {"h", &grad_h},
                                        {"C", &grad_C},
                                        {"n", &grad_n},
                                        {"m", &grad_m}}),
                    "torch_marlin_metal::mlstm: expected first derivatives only, got a second one (create_graph)");
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward_op().call(q, k, v, i, f, C0, n0, m0, h, grad_h, grad_C, grad_n, grad_m, chunk_size, eps);
}

// Casts q, k and v to autocast's dtype, as PyTorch does for linear. Gates and states keep their precision.
template <c10::DispatchKey kAutocastKey, c10::DeviceType kDevice>
FourTensors mlstm_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                           const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                           int64_t chunk_size, double eps) {
  c10::impl::ExcludeDispatchKeyGuard guard(kAutocastKey);
  auto cast = [](const Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), tensor, kDevice);
  };
  return mlstm_op().call(cast(q), cast(k), cast(v), i, f, C0, n0, m0, chunk_size, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("mlstm", mlstm_autograd);
  m.impl("mlstm_step", step_autograd);
  m.impl("mlstm_states", states_autograd);
  m.impl("mlstm_output", output_autograd);
  m.impl("_mlstm_backward", backward_autograd);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("_mlstm_backward", mlstm_backward);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("mlstm", mlstm_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("mlstm", mlstm_autocast<c10::DispatchKey::AutocastMPS, c10::DeviceType::MPS>);
}

}  // namespace marlin
