#include "csrc/experts/argument_rules.h"

#include <optional>

#include "csrc/core/gemm_variants.h"

namespace marlin {

namespace {

void check_moe_variant(const char* op, std::string_view variant) {
  const std::optional<GemmVariant> named = variant_of(variant);
  if (variant == "auto" || (named && variant == name(*named) && computes_experts(*named))) return;
  fail(op, "variant", expert_variants(), text("'", variant, "'"));
}

// Requires int32 or int64 [T, top_k]. If `top_k` has no value, any number of slots is valid.
void check_expert_ids(const Checker& check, const Tensor& ids, const c10::SymInt& T,
                      const std::optional<c10::SymInt>& top_k) {
  const bool integers = ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong;
  if (!integers || ids.dim() != 2 || ids.sym_size(0) != T || (top_k && ids.sym_size(1) != *top_k)) {
    fail(check.op, "expert_ids",
         top_k ? text("int32 or int64 [T, top_k] = [", T, ", ", *top_k, "]")
               : text("int32 or int64 [T, top_k] with T = ", T),
         describe(ids));
  }
  check.on_device("expert_ids", ids);
}

}  // namespace

WeightShape check_moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                           const OptionalTensor& bias, const OptionalTensor& row_weights, std::string_view variant,
                           const char* op) {
  const bool by_slot = a.dim() == 3;
  if (!is_floating(a.scalar_type()) || (a.dim() != 2 && !by_slot)) {
    fail(op, "a", text(kFloating, " [T, K] or [T, top_k, K]"), describe(a));
  }
  WeightShape shape = check_weight(op, weight, true);
  const WeightChecker check{{op, a.device()}, true, shape.E};
  check.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.K) {
    fail(op, "a", text("[T, K] or [T, top_k, K] with K = ", shape.K), describe(a));
  }
  check_expert_ids(check, expert_ids, a.sym_size(0),
                   by_slot ? std::optional<c10::SymInt>(a.sym_size(1)) : std::nullopt);
  if (bias) check.sized("bias", *bias, is_floating(bias->scalar_type()), kFloating, "N", {shape.N});
  if (row_weights) {
    if (!is_floating(row_weights->scalar_type()) || row_weights->sym_sizes() != expert_ids.sym_sizes()) {
      fail(op, "row_weights", text(kFloating, " [T, top_k] = ", expert_ids.sym_sizes()), describe(*row_weights));
    }
    check.on_device("row_weights", *row_weights);
  }
  check_moe_variant(op, variant);
  return shape;
}

WeightShape check_moe_gemm_grad_a(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids) {
  const char* op = "moe_gemm_grad_a";
  WeightShape shape = check_weight(op, weight, true);
  const Checker check{op, grad.device()};
  check.on_device("b_packed", weight.b_packed);
  if (!is_floating(grad.scalar_type()) || grad.dim() != 3 || grad.sym_size(2) != shape.N) {
    fail(op, "grad", text(kFloating, " [T, top_k, N] with N = ", shape.N), describe(grad));
  }
  check_expert_ids(check, expert_ids, grad.sym_size(0), grad.sym_size(1));
  return shape;
}

}  // namespace marlin
