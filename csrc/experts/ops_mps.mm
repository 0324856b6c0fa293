// moe_gemm and moe_gemm_gated for MPS: checks the tensors, finds a plan, encodes it, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "csrc/core/tensor_views.h"
#include "csrc/experts/gated.h"
#include "csrc/experts/gpu_plan.h"
#include "csrc/gemm/find_plan.h"
#include "csrc/weights/bind_weight.h"

namespace marlin::mps {
namespace {

// A problem with bindings for all tensors except the activations' rows and the output.
struct ExpertProducts {
  MoeProblem problem;
  Bindings bindings;
  Tensor rows;
};

// Makes the bindings that moe_gemm and moe_gemm_gated share. The caller has checked the arguments.
ExpertProducts bind_products(const char* op, const Tensor& a, const WeightArguments& weight, const WeightShape& shape,
                             const Tensor& expert_ids, const OptionalTensor& bias) {
  ExpertProducts products{.problem = {}, .bindings = {}, .rows = with_unit_stride(a)};
  products.bindings[kSlotBias] = contiguous_or_undefined(bias);
  products.bindings[kSlotExpertIds] = expert_ids.contiguous();
  products.problem = {.product = {.weight = bind_weight(op, weight, shape, products.bindings),
                                  .M = checked_size(op, "expert_ids", expert_ids.numel()),
                                  .a_row_stride = products.rows.stride(0),
                                  .activations = element_type(products.rows),
                                  .vector_aligned_a = is_aligned(products.rows, 4)},
                      .a_slot_stride = products.rows.dim() == 3 ? products.rows.stride(1) : 0,
                      .experts = checked_size(op, "experts", weight.b_packed.size(0)),
                      .top_k = checked_size(op, "top_k", expert_ids.size(1)),
                      .wide_ids = expert_ids.scalar_type() == at::kLong};
  set_bias(products.problem.product, bias);
  return products;
}

// Finds a plan for the tokens and encodes it. Divides the tokens over several plans as launch() divides rows.
void launch_moe(MoeProblem problem, Bindings bindings, const Tensor& a, const Tensor& out) {
  const Tensor ids = bindings[kSlotExpertIds], row_weights = bindings[kSlotRowWeights];
  const int64_t T = ids.size(0);
  problem.product.M = static_cast<uint32_t>(ids.numel());
  problem.product.vector_aligned_a = is_aligned(a, 4);
  bindings[kSlotA] = a;
  bindings[kSlotOut] = out;
  const std::shared_ptr<const CompiledPlan> compiled = find_plan(problem, plan_moe, a);
  const int64_t first = first_part(compiled->plan, T);
  if (first == T) return encode(*compiled, std::move(bindings));
  for (const auto& [start, tokens] : {std::pair(int64_t{0}, first), std::pair(first, T - first)}) {
    bindings[kSlotExpertIds] = ids.narrow(0, start, tokens);
    if (row_weights.defined()) bindings[kSlotRowWeights] = row_weights.narrow(0, start, tokens);
    launch_moe(problem, bindings, a.narrow(0, start, tokens), out.narrow(0, start, tokens));
  }
}

Tensor moe_gemm_mps(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                    const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                    std::string_view variant) {
  const WeightShape shape = check_moe_gemm(a, weight, expert_ids, bias, row_weights, variant);
  at::DimVector sizes(expert_ids.sizes());
  if (reduce) sizes.pop_back();
  sizes.push_back(weight.b_packed.size(2));
  if (expert_ids.numel() == 0) return at::zeros(sizes, a.options());
  Tensor out = at::empty(sizes, a.options());

  ExpertProducts products = bind_products("moe_gemm", a, weight, shape, expert_ids, bias);
  products.bindings[kSlotRowWeights] = contiguous_or_undefined(row_weights);
  MoeProblem& problem = products.problem;
  problem.product.variant = variant;
  problem.row_weights = row_weights ? element_type(*row_weights) : ElementType::float32;
  problem.has_row_weights = row_weights.has_value();
  problem.reduce = reduce;
  launch_moe(problem, std::move(products.bindings), products.rows, out);
  return out;
}

// Computes moe_gemm and a gated activation in one dispatch. The caller has checked the arguments. Returns [T, top_k, N
// / 2], or nullopt if the activation needs a separate dispatch.
std::optional<Tensor> moe_gemm_gated(const Tensor& a, const WeightArguments& weight, const WeightShape& shape,
                                     const Tensor& expert_ids, const OptionalTensor& bias, const MoeGate& gate) {
  if (expert_ids.numel() == 0) return std::nullopt;
  ExpertProducts products = bind_products("moe_gemm_gated", a, weight, shape, expert_ids, bias);
  products.problem.gate = gate;
  const std::shared_ptr<const CompiledPlan> compiled = find_plan(products.problem, plan_moe, a);
  const int64_t T = expert_ids.size(0);
  if (!compiled->plan.applies_gate || first_part(compiled->plan, T) < T) return std::nullopt;
  Tensor out = at::empty({T, expert_ids.size(1), weight.b_packed.size(2) / 2}, a.options());
  products.bindings[kSlotA] = products.rows;
  products.bindings[kSlotOut] = out;
  encode(*compiled, std::move(products.bindings));
  return out;
}

// Encodes one dispatch if there are few rows, otherwise the dispatches of moe_gemm and gated_activation.
Tensor moe_gemm_gated_mps(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                          const OptionalTensor& bias, std::string_view activation, bool interleaved,
                          std::optional<double> limit, std::optional<double> alpha) {
  const auto [shape, kind] = check_moe_gemm_gated(a, weight, expert_ids, bias, activation, limit, alpha);
  const MoeGate gate{.activation = static_cast<int32_t>(kind),
                     .interleaved = interleaved,
                     .limit = static_cast<float>(limit.value_or(0)),
                     .alpha = static_cast<float>(alpha.value_or(0))};
  if (auto gated = moe_gemm_gated(a, weight, shape, expert_ids, bias, gate)) return *gated;
  return moe_gemm_then_activation(a, weight, expert_ids, bias, activation, interleaved, limit, alpha);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("moe_gemm", weight_kernel<moe_gemm_mps>);
  m.impl("moe_gemm_gated", weight_kernel<moe_gemm_gated_mps>);
}

}  // namespace marlin::mps
