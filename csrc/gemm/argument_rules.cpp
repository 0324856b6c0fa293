#include "csrc/gemm/argument_rules.h"

#include "csrc/core/gemm_variants.h"

namespace marlin {

namespace {

void check_variant(const char* op, std::string_view variant, const Tensor& a) {
  if (is_gemm_variant(variant, element_type(a))) return;
  std::string known = "auto, rounded";
  for (std::string_view name : kGemmVariants)
    known.append(", ").append(name);
  fail(op, "variant", "one of " + known + ", or VARIANT:TILE, such as 'double_buffered:128x64x16'",
       text("'", variant, "'"));
}

// Checks `activations` by the rules of all backends. "int8" requires codes that are integers or, for E2M1, multiples of
// 1/2.
void check_activations(const char* op, OptionalText activations, WeightFormat format, std::string_view variant,
                       const Tensor& a) {
  if (!activations) return;
  if (*activations != "int8") fail(op, "activations", "None or 'int8'", text("'", *activations, "'"));
  if (a.device().is_mps())
    fail(op, "activations", "None for tensors on mps: only the CPU rounds activations", "'int8'");
  if (variant != "auto") fail(op, "variant", "'auto' with activations='int8'", text("'", variant, "'"));
  if (code_kind(format) == CodeKind::table || code_kind(format) == CodeKind::e4m3) {
    fail(op, "activations",
         text("None for ", name(format), ", whose codes are no integers: requantize the weight to another format"),
         "'int8'");
  }
}

}  // namespace

WeightShape check_gemm(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                       std::string_view variant, OptionalText activations, const char* op) {
  const WeightChecker check{{op, a.device()}};
  if (!is_floating(a.scalar_type()) || a.dim() < 1) fail(op, "a", text(kFloating, " [..., K]"), describe(a));
  WeightShape shape = check_weight(op, weight);
  check.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.K) {
    fail(op, "a", text("[..., K] with K = ", shape.K), describe(a));
  }
  if (bias) check.sized("bias", *bias, is_floating(bias->scalar_type()), kFloating, "N", {shape.N});
  check_variant(op, variant, a);
  check_activations(op, activations, shape.format, variant, a);
  return shape;
}

WeightShape check_gemm_transposed(const Tensor& a, const WeightArguments& weight) {
  const char* op = "gemm_transposed";
  if (!is_floating(a.scalar_type()) || a.dim() < 1) fail(op, "a", text(kFloating, " [..., N]"), describe(a));
  WeightShape shape = check_weight(op, weight);
  Checker{op, a.device()}.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.N) {
    fail(op, "a", text("[..., N] with N = ", shape.N, " (the columns of b_packed)"), describe(a));
  }
  return shape;
}

}  // namespace marlin
