// The derivative of moe_gemm with respect to a and row_weights, and autocast for moe_gemm. All other arguments refuse
// tensors that require grad.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "csrc/ops/argument_rules.h"
#include "csrc/ops/operators.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor of_expert(const OptionalTensor& stack, int64_t expert) {
  return stack ? OptionalTensor(stack->select(0, expert)) : std::nullopt;
}

// Multiplies each row of grad [T, top_k, N] by the transposed weight of the row's expert. Returns fp32 [T, top_k, K].
// Decodes one expert at a time, in parts (see gemm_transposed.cpp). The host must know which experts have rows, so on
// mps it waits for expert_ids.
Tensor moe_gemm_grad_a(const Tensor& grad, const Tensor& b_packed, const Tensor& scales, const Tensor& expert_ids,
                       c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                       const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm) {
  check_moe_gemm_grad_a(grad, {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm},
                        expert_ids);
  const int64_t experts = b_packed.size(0);
  const Tensor ids = expert_ids.to(at::kCPU, at::kLong).contiguous();
  std::vector<std::vector<int64_t>> pairs(static_cast<size_t>(experts));
  for (int64_t pair = 0; pair < ids.numel(); ++pair) {
    const int64_t expert = ids.const_data_ptr<int64_t>()[pair];
    if (expert >= 0 && expert < experts) pairs[static_cast<size_t>(expert)].push_back(pair);
  }
  const Tensor rows = grad.reshape({-1, grad.size(2)}).to(at::kFloat);
  Tensor out = at::zeros({rows.size(0), b_packed.size(1) * kCodesPerWord}, rows.options());
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto& own = pairs[static_cast<size_t>(expert)];
    if (own.empty()) continue;
    const Tensor index = at::tensor(own, ids.options()).to(grad.device());
    const Tensor product = gemm_transposed_op().call(
        rows.index_select(0, index), b_packed.select(0, expert), scales.select(0, expert), weight_format, group_size,
        of_expert(zeros, expert), of_expert(global_scale, expert), lut, of_expert(perm, expert));
    out.index_copy_(0, index, product);
  }
  return out.reshape({grad.size(0), grad.size(1), out.size(1)});
}

// The tensors that the backward pass of moe_gemm needs.
struct SavedTensors {
  Tensor b_packed, scales, expert_ids;
  OptionalTensor zeros, global_scale, lut, perm, row_weights, a, bias;

  void save(AutogradContext* ctx) const {
    variable_list tensors{b_packed, scales, expert_ids};
    for (const OptionalTensor* tensor : {&zeros, &global_scale, &lut, &perm, &row_weights, &a, &bias})
      tensors.push_back(tensor->value_or(Tensor()));
    ctx->save_for_backward(std::move(tensors));
  }

  static SavedTensors load(const AutogradContext* ctx) {
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [&](size_t i) { return saved[i].defined() ? OptionalTensor(saved[i]) : std::nullopt; };
    return {saved[0],    saved[1],    saved[2],    optional(3), optional(4),
            optional(5), optional(6), optional(7), optional(8), optional(9)};
  }
};

class MoeGemmFunction : public torch::autograd::Function<MoeGemmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b_packed, const Tensor& scales,
                        const Tensor& expert_ids, const std::string& weight_format, int64_t group_size,
                        const OptionalTensor& zeros, const OptionalTensor& global_scale, const OptionalTensor& lut,
                        const OptionalTensor& perm, const OptionalTensor& bias, const OptionalTensor& row_weights,
                        bool reduce, const std::string& variant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool weights_grad = row_weights && row_weights->requires_grad();
    const SavedTensors saved{b_packed,
                             scales,
                             expert_ids,
                             zeros,
                             global_scale,
                             lut,
                             perm,
                             row_weights,
                             weights_grad ? OptionalTensor(a) : std::nullopt,
                             weights_grad ? bias : std::nullopt};
    saved.save(ctx);
    ctx->saved_data["weight_format"] = weight_format;
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["variant"] = variant;
    ctx->saved_data["reduce"] = reduce;
    ctx->saved_data["a_dim"] = a.dim();
    ctx->saved_data["a_grad"] = a.requires_grad();
    ctx->saved_data["weights_grad"] = weights_grad;
    return moe_gemm_op().call(a, b_packed, scales, expert_ids, weight_format, group_size, zeros, global_scale, lut,
                              perm, bias, row_weights, reduce, variant);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    variable_list result(14);
    const SavedTensors saved = SavedTensors::load(ctx);
    const auto weight_format = ctx->saved_data["weight_format"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    // The gradient of each pair's row: [T, top_k, N], or [T, 1, N] if the rows were added up.
    Tensor of_pairs = grad.to(at::kFloat);
    if (ctx->saved_data["reduce"].toBool()) of_pairs = of_pairs.unsqueeze(1);
    if (ctx->saved_data["weights_grad"].toBool()) {
      // As in the forward pass, the products stay in fp32 until they are multiplied by the row weights: a product may
      // exceed fp16's range although its weighted value does not.
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const Tensor products =
          moe_gemm_op().call(saved.a->to(at::kFloat), saved.b_packed, saved.scales, saved.expert_ids, weight_format,
                             group_size, saved.zeros, saved.global_scale, saved.lut, saved.perm, saved.bias,
                             std::nullopt, false, ctx->saved_data["variant"].toStringRef());
      result[11] = (products * of_pairs).sum(-1).to(saved.row_weights->scalar_type());
    }
    if (ctx->saved_data["a_grad"].toBool()) {
      const Tensor weighted = saved.row_weights
                                  ? of_pairs * saved.row_weights->to(at::kFloat).unsqueeze(-1)
                                  : of_pairs.expand_symint({saved.expert_ids.sym_size(0), saved.expert_ids.sym_size(1),
                                                            of_pairs.sym_size(2)});
      Tensor of_a = moe_gemm_grad_a_op().call(weighted, saved.b_packed, saved.scales, saved.expert_ids, weight_format,
                                              group_size, saved.zeros, saved.global_scale, saved.lut, saved.perm);
      if (ctx->saved_data["a_dim"].toInt() == 2) of_a = of_a.sum(1);
      result[0] = of_a.to(grad.scalar_type());
    }
    return result;
  }
};

// Refuses second derivatives.
Tensor moe_gemm_grad_a_autograd(const Tensor& grad, const Tensor& b_packed, const Tensor& scales,
                                const Tensor& expert_ids, c10::string_view weight_format, int64_t group_size,
                                const OptionalTensor& zeros, const OptionalTensor& global_scale,
                                const OptionalTensor& lut, const OptionalTensor& perm) {
  const char* op = "moe_gemm_grad_a";
  check_no_grad(op, "grad", grad);
  check_no_tangent(op, "grad", grad);
  at::AutoDispatchBelowADInplaceOrView guard;
  return moe_gemm_grad_a_op().call(grad, b_packed, scales, expert_ids, weight_format, group_size, zeros, global_scale,
                                   lut, perm);
}

Tensor moe_gemm_autograd(const Tensor& a, const Tensor& b_packed, const Tensor& scales, const Tensor& expert_ids,
                         c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                         const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                         const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                         c10::string_view variant) {
  const char* op = "moe_gemm";
  check_weight_no_grad(op, {b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm});
  if (bias) {
    check_no_grad(op, "bias", *bias);
    check_no_tangent(op, "bias", *bias);
  }
  check_no_tangent(op, "a", a);
  if (row_weights) check_no_tangent(op, "row_weights", *row_weights);
  const bool differentiate =
      c10::GradMode::is_enabled() && (a.requires_grad() || (row_weights && row_weights->requires_grad()));
  if (differentiate) {
    return MoeGemmFunction::apply(a, b_packed, scales, expert_ids, std::string(weight_format), group_size, zeros,
                                  global_scale, lut, perm, bias, row_weights, reduce, std::string(variant));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return moe_gemm_op().call(a, b_packed, scales, expert_ids, weight_format, group_size, zeros, global_scale, lut, perm,
                            bias, row_weights, reduce, variant);
}

// Casts activations as autocast does for linear; see gemm_autocast.
template <c10::DispatchKey kAutocastKey, c10::DeviceType kDevice>
Tensor moe_gemm_autocast(const Tensor& a, const Tensor& b_packed, const Tensor& scales, const Tensor& expert_ids,
                         c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                         const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                         const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                         c10::string_view variant) {
  c10::impl::ExcludeDispatchKeyGuard guard(kAutocastKey);
  const Tensor cast = at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), a, kDevice);
  return moe_gemm_op().call(cast, b_packed, scales, expert_ids, weight_format, group_size, zeros, global_scale, lut,
                            perm, bias, row_weights, reduce, variant);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("moe_gemm_grad_a", moe_gemm_grad_a);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("moe_gemm", moe_gemm_autograd);
  m.impl("moe_gemm_grad_a", moe_gemm_grad_a_autograd);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("moe_gemm", moe_gemm_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("moe_gemm", moe_gemm_autocast<c10::DispatchKey::AutocastMPS, c10::DeviceType::MPS>);
}

}  // namespace marlin
