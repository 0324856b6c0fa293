// The derivatives of moe_gemm with respect to `a` and `row_weights`, and autocast for moe_gemm. Any other argument that
// requires grad is an error.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

#include "csrc/core/autocast.h"
#include "csrc/core/saved_weight.h"
#include "csrc/experts/argument_rules.h"
#include "csrc/experts/operators.h"
#include "csrc/gemm/operators.h"

namespace marlin {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OwnedWeight select_expert(const WeightArguments& stack, int64_t expert) {
  OwnedWeight weight = stack.own();
  for (Tensor* tensor : {&weight.b_packed, &weight.scales})
    *tensor = tensor->select(0, expert);
  for (OptionalTensor* tensor : {&weight.zeros, &weight.super_scales, &weight.super_zeros, &weight.global_scale,
                                 &weight.perm, &weight.b_high})  // all experts share lut
    if (*tensor) *tensor = (*tensor)->select(0, expert);
  return weight;
}

// Multiplies each row of grad [T, top_k, N] by the transposed weight of the row's expert. Returns fp32 [T, top_k, K].
// Decodes one expert at a time, in parts (see gemm_transposed.cpp). On mps the host waits for expert_ids, because it
// must know which experts have rows.
Tensor moe_gemm_grad_a(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids) {
  const int64_t K = check_moe_gemm_grad_a(grad, weight, expert_ids).K.expect_int();
  const int64_t experts = weight.b_packed.size(0);
  const Tensor ids = expert_ids.to(at::kCPU, at::kLong).contiguous();
  std::vector<std::vector<int64_t>> pairs(static_cast<size_t>(experts));
  for (int64_t pair = 0; pair < ids.numel(); ++pair) {
    const int64_t expert = ids.const_data_ptr<int64_t>()[pair];
    if (expert >= 0 && expert < experts) pairs[static_cast<size_t>(expert)].push_back(pair);
  }
  const Tensor rows = grad.reshape({-1, grad.size(2)}).to(at::kFloat);
  Tensor out = at::zeros({rows.size(0), K}, rows.options());
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto& own = pairs[static_cast<size_t>(expert)];
    if (own.empty()) continue;
    const Tensor index = at::tensor(own, ids.options()).to(grad.device());
    const OwnedWeight own_weight = select_expert(weight, expert);
    const Tensor product = gemm_transposed_op().call(rows.index_select(0, index), own_weight.arguments());
    out.index_copy_(0, index, product);
  }
  return out.reshape({grad.size(0), grad.size(1), out.size(1)});
}

class MoeGemmFunction : public torch::autograd::Function<MoeGemmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                        const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                        std::string_view variant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool weights_grad = row_weights && row_weights->requires_grad();
    SavedWeight::save(ctx, weight,
                      {expert_ids, row_weights.value_or(Tensor()), weights_grad ? a : Tensor(),
                       weights_grad ? bias.value_or(Tensor()) : Tensor()});
    ctx->saved_data["variant"] = std::string(variant);
    ctx->saved_data["reduce"] = reduce;
    ctx->saved_data["a_dim"] = a.dim();
    ctx->saved_data["a_grad"] = a.requires_grad();
    ctx->saved_data["weights_grad"] = weights_grad;
    return moe_gemm_op().call(a, weight, expert_ids, bias, row_weights, reduce, variant);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    variable_list result(7);
    const SavedWeight saved = SavedWeight::load(ctx);
    const WeightArguments weight = saved.weight.arguments();
    const Tensor &expert_ids = saved.others[0], &row_weights = saved.others[1], &a = saved.others[2];
    // The gradient of each pair's product: [T, top_k, N], or [T, 1, N] if the forward pass added up the products of a
    // token.
    Tensor of_pairs = grad.to(at::kFloat);
    if (ctx->saved_data["reduce"].toBool()) of_pairs = of_pairs.unsqueeze(1);
    if (ctx->saved_data["weights_grad"].toBool()) {
      // As in the forward pass, the products stay in fp32 until they are multiplied by the row weights. A product may
      // exceed the range of fp16 although its weighted value does not.
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const Tensor products =
          moe_gemm_op().call(a.to(at::kFloat), weight, expert_ids, SavedWeight::optional(saved.others[3]), std::nullopt,
                             false, ctx->saved_data["variant"].toStringRef());
      result[4] = (products * of_pairs).sum(-1).to(row_weights.scalar_type());
    }
    if (ctx->saved_data["a_grad"].toBool()) {
      const Tensor weighted =
          row_weights.defined()
              ? of_pairs * row_weights.to(at::kFloat).unsqueeze(-1)
              : of_pairs.expand_symint({expert_ids.sym_size(0), expert_ids.sym_size(1), of_pairs.sym_size(2)});
      Tensor of_a = moe_gemm_grad_a_op().call(weighted, weight, expert_ids);
      if (ctx->saved_data["a_dim"].toInt() == 2) of_a = of_a.sum(1);
      result[0] = of_a.to(grad.scalar_type());
    }
    return result;
  }
};

// Raises an error if a second derivative is needed.
Tensor moe_gemm_grad_a_autograd(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids) {
  const char* op = "moe_gemm_grad_a";
  check_no_grad(op, "grad", grad);
  check_no_tangent(op, "grad", grad);
  at::AutoDispatchBelowADInplaceOrView guard;
  return moe_gemm_grad_a_op().call(grad, weight, expert_ids);
}

Tensor moe_gemm_autograd(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                         const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                         std::string_view variant) {
  const char* op = "moe_gemm";
  check_weight_no_grad(op, weight, bias);
  check_no_tangent(op, "a", a);
  if (row_weights) check_no_tangent(op, "row_weights", *row_weights);
  const bool differentiate =
      c10::GradMode::is_enabled() && (a.requires_grad() || (row_weights && row_weights->requires_grad()));
  if (differentiate) return MoeGemmFunction::apply(a, weight, expert_ids, bias, row_weights, reduce, variant);
  at::AutoDispatchBelowADInplaceOrView guard;
  return moe_gemm_op().call(a, weight, expert_ids, bias, row_weights, reduce, variant);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("moe_gemm_grad_a", weight_kernel<moe_gemm_grad_a>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("moe_gemm", weight_kernel<moe_gemm_autograd>);
  m.impl("moe_gemm_grad_a", weight_kernel<moe_gemm_grad_a_autograd>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastCPU, m) {
  m.impl("moe_gemm", Autocast<MoeGemmSignature>::cpu<moe_gemm_op>);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, AutocastMPS, m) {
  m.impl("moe_gemm", Autocast<MoeGemmSignature>::mps<moe_gemm_op>);
}

}  // namespace marlin
