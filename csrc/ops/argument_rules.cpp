#include "csrc/ops/argument_rules.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "csrc/core/gemm_variants.h"
#include "csrc/ops/tensor_checks.h"

namespace marlin {

namespace {

bool is_activation_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

const std::string kZeroPoints = "uint8 codes or " + std::string(kFloating) + " zero points";

struct WeightChecker : Checker {
  bool stacked = false;  // tensors have a leading dimension E
  c10::SymInt E = 1;

  // Requires a tensor of one of `dtypes` on the device, with these sizes of dimensions called `names`.
  void sized(std::string_view argument, const Tensor& tensor, bool dtype_ok, std::string_view dtypes,
             std::string_view names, c10::SymDimVector sizes) const {
    if (stacked) sizes.insert(sizes.begin(), E);
    if (!dtype_ok || tensor.sym_sizes() != c10::SymIntArrayRef(sizes)) {
      fail(op, argument, text(dtypes, " ", dimensions(names), " = ", c10::SymIntArrayRef(sizes)), describe(tensor));
    }
    on_device(argument, tensor);
  }

  // Requires packed words: int32, contiguous.
  void words(std::string_view argument, const Tensor& tensor, std::string_view names) const {
    if (tensor.scalar_type() != at::kInt || tensor.dim() != (stacked ? 3 : 2))
      fail(op, argument, text("int32 ", dimensions(names)), describe(tensor));
    contiguous(argument, tensor);
  }

  void perm(const OptionalTensor& perm, const c10::SymInt& K) const {
    if (perm) sized("perm", *perm, perm->scalar_type() == at::kInt, "int32", "K", {K});
  }

  std::string dimensions(std::string_view names) const { return text(stacked ? "[E, " : "[", names, "]"); }
};

WeightFormat find_format(const char* op, std::string_view wanted) {
  const auto* found = std::find_if(kWeightFormats.begin(), kWeightFormats.end(),
                                   [&](WeightFormat format) { return name(format) == wanted; });
  if (found == kWeightFormats.end()) {
    std::string known;
    for (WeightFormat format : kWeightFormats)
      known += (known.empty() ? "" : ", ") + std::string(name(format));
    fail(op, "weight_format", "one of " + known, text("'", wanted, "'"));
  }
  return *found;
}

void check_group_size(const char* op, WeightFormat format, int64_t group_size, const c10::SymInt& K) {
  std::string rule;
  if (const uint32_t fixed = fixed_group_size(format); fixed != 0) {
    if (group_size == fixed) return;
    rule = std::to_string(fixed);
  } else {
    if (std::find(kGroupSizes.begin(), kGroupSizes.end(), group_size) != kGroupSizes.end()) return;
    if (K == group_size) return;
    for (int64_t size : kGroupSizes)
      rule += std::to_string(size) + ", ";
    rule = text("one of ", rule, "or K = ", K);
  }
  fail(op, "group_size", text(rule, " for ", name(format)), std::to_string(group_size));
}

void check_scales_and_zeros(const WeightChecker& check, WeightFormat format, const WeightArguments& weight,
                            const c10::SymInt& G, const c10::SymInt& N) {
  const at::ScalarType scales_dtype = weight.scales.scalar_type();
  if (!has_coded_scales(format)) {
    check.sized("scales", weight.scales, is_activation_dtype(scales_dtype), kFloating, "G, N", {G, N});
  } else {
    const std::string_view dtypes = scale_coding(format) == ScaleCoding::e4m3
                                        ? "uint8 E4M3 codes (view float8 tensors as uint8)"
                                        : "uint8 E8M0 codes (view float8 tensors as uint8)";
    check.sized("scales", weight.scales, scales_dtype == at::kByte, dtypes, "G, N", {G, N});
  }
  if (zeros_role(format) == ZerosRole::none) {
    if (weight.zeros) fail(check.op, "zeros", text("none for ", name(format)), describe(*weight.zeros));
    return;
  }
  const bool bias = zeros_role(format) == ZerosRole::bias;
  const std::string_view dtypes = bias ? kFloating : std::string_view(kZeroPoints);
  if (!weight.zeros)
    fail(check.op, "zeros", text(dtypes, " ", check.dimensions("G, N"), " for ", name(format)), "None");
  const at::ScalarType zeros_dtype = weight.zeros->scalar_type();
  check.sized("zeros", *weight.zeros, is_activation_dtype(zeros_dtype) || (!bias && zeros_dtype == at::kByte), dtypes,
              "G, N", {G, N});
}

void check_global_scale_and_lut(const WeightChecker& check, WeightFormat format, const WeightArguments& weight,
                                const c10::SymInt& N) {
  if (weight.global_scale) {
    const Tensor& scale = *weight.global_scale;
    if (!takes_global_scale(format)) fail(check.op, "global_scale", text("none for ", name(format)), describe(scale));
    const int64_t dims = scale.dim() - (check.stacked ? 1 : 0);
    const bool stack_ok = !check.stacked || (scale.dim() >= 1 && scale.sym_size(0) == check.E);
    const bool shape_ok =
        stack_ok && (dims == 0 || (dims == 1 && (scale.sym_size(-1) == 1 || scale.sym_size(-1) == N)));
    if (scale.scalar_type() != at::kFloat || !shape_ok) {
      fail(check.op, "global_scale",
           check.stacked ? text("float32 [E], [E, 1] or [E, N] = [", check.E, ", ", N, "]")
                         : text("float32 [], [1] or [N] = [", N, "]"),
           describe(scale));
    }
    check.on_device("global_scale", scale);
  }
  if (has_lut(format) != weight.lut.has_value()) {
    fail(check.op, "lut", text(has_lut(format) ? "float32 [16] for " : "none for ", name(format)),
         weight.lut ? describe(*weight.lut) : "None");
  }
  if (weight.lut) {
    if (weight.lut->scalar_type() != at::kFloat || weight.lut->dim() != 1 || weight.lut->sym_size(0) != 16) {
      fail(check.op, "lut", "float32 [16]", describe(*weight.lut));
    }
    check.on_device("lut", *weight.lut);
  }
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

[[noreturn]] void fail(const char* op, std::string_view argument, const std::string& expected, const std::string& got) {
  TORCH_CHECK_VALUE(false, "torch_marlin_metal::", op, ": ", argument, ": expected ", expected, ", got ", got);
  __builtin_unreachable();
}

std::string describe(const Tensor& tensor) {
  return text(dtype_name(tensor.scalar_type()), " ", tensor.sym_sizes());
}

ElementType element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return ElementType::float16;
    case at::kBFloat16:
      return ElementType::bfloat16;
    case at::kByte:
      return ElementType::uint8;
    default:
      return ElementType::float32;
  }
}

namespace {

WeightShape check_weight(const char* op, const WeightArguments& weight, bool stacked) {
  WeightChecker check{{op, weight.b_packed.device()}, stacked};
  const WeightFormat format = find_format(op, weight.weight_format);
  check.words("b_packed", weight.b_packed, "K/8, N");
  if (stacked) check.E = weight.b_packed.sym_size(0);
  const c10::SymInt K = weight.b_packed.sym_size(-2) * kCodesPerWord;
  const c10::SymInt N = weight.b_packed.sym_size(-1);
  if (K < kCodesPerWord || N < 1) fail(op, "b_packed", "at least one word and one column", describe(weight.b_packed));
  if (check.E < 1) fail(op, "b_packed", "at least one expert", describe(weight.b_packed));
  check_group_size(op, format, weight.group_size, K);
  const c10::SymInt G = (K + (weight.group_size - 1)) / weight.group_size;
  check_scales_and_zeros(check, format, weight, G, N);
  check_global_scale_and_lut(check, format, weight, N);
  check.perm(weight.perm, K);
  return {format, K, N, check.E};
}

void check_variant(const char* op, std::string_view variant, const Tensor& a) {
  if (is_gemm_variant(variant, element_type(a))) return;
  std::string known = "auto";
  for (std::string_view name : kGemmVariants)
    known.append(", ").append(name);
  fail(op, "variant", "one of " + known + ", or a variant with one of its tiles ('double_buffered:128x64x16')",
       text("'", variant, "'"));
}

void check_moe_variant(const char* op, std::string_view variant) {
  const std::optional<GemmVariant> named = variant_of(variant);
  if (variant == "auto" || (named && variant == name(*named) && computes_experts(*named))) return;
  fail(op, "variant", expert_variants(), text("'", variant, "'"));
}

// Requires int32 or int64 [T, top_k]. Without a value, top_k may be any number.
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

WeightShape check_weight(const char* op, const WeightArguments& weight) {
  return check_weight(op, weight, false);
}

WeightShape check_gemm(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                       std::string_view variant, const char* op) {
  const Checker check{op, a.device()};
  if (!is_activation_dtype(a.scalar_type()) || a.dim() < 1) fail(op, "a", text(kFloating, " [..., K]"), describe(a));
  WeightShape shape = check_weight(op, weight);
  check.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.K) {
    fail(op, "a", text("[..., K] with K = ", shape.K, " (8 x the rows of b_packed)"), describe(a));
  }
  if (bias) {
    if (!is_activation_dtype(bias->scalar_type()) || bias->dim() != 1 || bias->sym_size(0) != shape.N) {
      fail(op, "bias", text(kFloating, " [N] = [", shape.N, "]"), describe(*bias));
    }
    check.on_device("bias", *bias);
  }
  check_variant(op, variant, a);
  return shape;
}

WeightShape check_moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                           const OptionalTensor& bias, const OptionalTensor& row_weights, std::string_view variant,
                           const char* op) {
  const bool by_slot = a.dim() == 3;
  if (!is_activation_dtype(a.scalar_type()) || (a.dim() != 2 && !by_slot)) {
    fail(op, "a", text(kFloating, " [T, K] or [T, top_k, K]"), describe(a));
  }
  WeightShape shape = check_weight(op, weight, true);
  const WeightChecker check{{op, a.device()}, true, shape.E};
  check.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.K) {
    fail(op, "a", text("[T, K] or [T, top_k, K] with K = ", shape.K, " (8 x the rows of b_packed)"), describe(a));
  }
  check_expert_ids(check, expert_ids, a.sym_size(0),
                   by_slot ? std::optional<c10::SymInt>(a.sym_size(1)) : std::nullopt);
  if (bias) check.sized("bias", *bias, is_activation_dtype(bias->scalar_type()), kFloating, "N", {shape.N});
  if (row_weights) {
    if (!is_activation_dtype(row_weights->scalar_type()) || row_weights->sym_sizes() != expert_ids.sym_sizes()) {
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
  if (!is_activation_dtype(grad.scalar_type()) || grad.dim() != 3 || grad.sym_size(2) != shape.N) {
    fail(op, "grad", text(kFloating, " [T, top_k, N] with N = ", shape.N), describe(grad));
  }
  check_expert_ids(check, expert_ids, grad.sym_size(0), grad.sym_size(1));
  return shape;
}

WeightShape check_gemm_transposed(const Tensor& a, const WeightArguments& weight) {
  const char* op = "gemm_transposed";
  if (!is_activation_dtype(a.scalar_type()) || a.dim() < 1) fail(op, "a", text(kFloating, " [..., N]"), describe(a));
  WeightShape shape = check_weight(op, weight);
  Checker{op, a.device()}.on_device("b_packed", weight.b_packed);
  if (a.sym_size(-1) != shape.N) {
    fail(op, "a", text("[..., N] with N = ", shape.N, " (the columns of b_packed)"), describe(a));
  }
  return shape;
}

WeightShape check_dequantize(const WeightArguments& weight, at::ScalarType dtype) {
  WeightShape shape = check_weight("dequantize", weight);
  if (!is_activation_dtype(dtype)) fail("dequantize", "dtype", std::string(kFloating), dtype_name(dtype));
  return shape;
}

WeightShape check_embedding(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const char* op = "embedding";
  if (ids.scalar_type() != at::kInt && ids.scalar_type() != at::kLong) {
    fail(op, "ids", "int32 or int64 of any shape", describe(ids));
  }
  WeightShape shape = check_weight(op, weight);
  Checker{op, ids.device()}.on_device("b_packed", weight.b_packed);
  if (!is_activation_dtype(dtype)) fail(op, "dtype", std::string(kFloating), dtype_name(dtype));
  return shape;
}

void check_gptq_repack(const Tensor& qweight, const OptionalTensor& perm) {
  const WeightChecker check{{"gptq_repack", qweight.device()}};
  check.words("qweight", qweight, "K/8, N");
  check.perm(perm, qweight.sym_size(0) * kCodesPerWord);
}

StoredZeros check_gptq_unpack_zeros(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule) {
  const char* op = "gptq_unpack_zeros";
  WeightChecker{{op, qzeros.device()}}.words("qzeros", qzeros, "G, N/8");
  if (checkpoint_version != 1 && checkpoint_version != 2) {
    fail(op, "checkpoint_version", "1 or 2", std::to_string(checkpoint_version));
  }
  const bool adds_one = checkpoint_version == 1;
  if (rule == "word") return adds_one ? StoredZeros::word : StoredZeros::plain;
  if (rule == "masked") return adds_one ? StoredZeros::masked : StoredZeros::plain;
  if (rule == "unmasked") return adds_one ? StoredZeros::unmasked : StoredZeros::plain;
  fail(op, "rule", "one of word, masked, unmasked", text("'", rule, "'"));
}

void check_awq_repack(const Tensor& qweight) {
  const WeightChecker check{{"awq_repack", qweight.device()}};
  check.words("qweight", qweight, "K, N/8");
  if (qweight.sym_size(0) % kCodesPerWord != 0) {
    fail(check.op, "qweight", "[K, N/8] with K a multiple of 8", describe(qweight));
  }
}

void check_awq_unpack_zeros(const Tensor& qzeros) {
  WeightChecker{{"awq_unpack_zeros", qzeros.device()}}.words("qzeros", qzeros, "G, N/8");
}

void check_transpose_words(const Tensor& words) {
  WeightChecker{{"transpose_words", words.device()}}.words("words", words, "N, K/8");
}

void check_no_grad(const char* op, const char* argument, const Tensor& tensor) {
  if (c10::GradMode::is_enabled() && tensor.requires_grad()) {
    fail(op, argument, "a tensor that does not require grad", describe(tensor) + " that requires grad");
  }
}

void check_weight_no_grad(const char* op, const WeightArguments& weight) {
  const auto check = [op](const char* argument, const Tensor& tensor) {
    check_no_grad(op, argument, tensor);
    check_no_tangent(op, argument, tensor);
  };
  check("scales", weight.scales);
  if (weight.zeros) check("zeros", *weight.zeros);
  if (weight.global_scale) check("global_scale", *weight.global_scale);
  if (weight.lut) check("lut", *weight.lut);
}

void check_no_tangent(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor._fw_grad(/*level=*/0).defined(), "torch_marlin_metal::", op, ": ", argument,
                    ": expected no forward-mode tangent, got one: ", op, " has reverse-mode derivatives only");
}

}  // namespace marlin
