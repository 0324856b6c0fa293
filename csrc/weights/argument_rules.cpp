#include "csrc/weights/argument_rules.h"

#include <algorithm>

namespace marlin {

namespace {

const std::string kZeroPoints = "uint8 codes or " + std::string(kFloating) + " zero points";

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

void check_high_plane(const WeightChecker& check, WeightFormat format, const WeightArguments& weight,
                      const c10::SymInt& K, const c10::SymInt& N) {
  const uint32_t bits = high_bits(format);
  if (bits == 0) {
    if (weight.b_high) fail(check.op, "b_high", text("none for ", name(format)), describe(*weight.b_high));
    return;
  }
  const std::string_view sizes = bits == 1 ? "K/32, N" : "K/16, N";
  if (!weight.b_high) fail(check.op, "b_high", text("int32 ", check.dimensions(sizes), " for ", name(format)), "None");
  const int64_t per_word = k_per_high_word(bits);
  check.sized("b_high", *weight.b_high, weight.b_high->scalar_type() == at::kInt, "int32", sizes,
              {(K + (per_word - 1)) / per_word, N});
  check.contiguous("b_high", *weight.b_high);
}

constexpr std::string_view kScaleCodes = "uint8 or int8 codes";
constexpr std::string_view kBiasCodes = "uint8 codes";

// Checks super_scales and super_zeros, the second level of scales and zeros.
void check_super(const WeightChecker& check, WeightFormat format, const WeightArguments& weight, const c10::SymInt& K,
                 const c10::SymInt& N) {
  const auto sized = [&](const char* argument, const Tensor& tensor) {
    check.sized(argument, tensor, is_floating(tensor.scalar_type()), kFloating, "K/256, N",
                {(K + (kSuperBlock - 1)) / kSuperBlock, N});
  };
  if (!weight.super_scales) {
    if (weight.super_zeros) fail(check.op, "super_zeros", "none without super_scales", describe(*weight.super_zeros));
    return;
  }
  if (has_coded_scales(format))
    fail(check.op, "super_scales", text("none for ", name(format)), describe(*weight.super_scales));
  if (weight.group_size > kSuperBlock)
    fail(check.op, "group_size", text("at most ", kSuperBlock, " with super_scales"),
         std::to_string(weight.group_size));
  sized("super_scales", *weight.super_scales);
  if (!weight.super_zeros) return;
  if (zeros_role(format) != ZerosRole::bias)
    fail(check.op, "super_zeros", text("none for ", name(format)), describe(*weight.super_zeros));
  sized("super_zeros", *weight.super_zeros);
  const at::ScalarType dtype = weight.super_scales->scalar_type();
  if (weight.super_zeros->scalar_type() != dtype)
    fail(check.op, "super_zeros", text("the dtype of super_scales, ", dtype_name(dtype)),
         describe(*weight.super_zeros));
}

// Returns true if the scales have one column for every kScaleBlock columns of the weight.
bool has_block_scales(WeightFormat format, const WeightArguments& weight, const c10::SymInt& N) {
  return takes_block_scales(format) && weight.group_size == kScaleBlock && weight.scales.dim() > 0 &&
         weight.scales.sym_size(-1) * kScaleBlock == N;
}

void check_scales_and_zeros(const WeightChecker& check, WeightFormat format, const WeightArguments& weight,
                            const c10::SymInt& G, const c10::SymInt& N, bool block_scales) {
  const at::ScalarType scales_dtype = weight.scales.scalar_type();
  if (weight.super_scales) {
    check.sized("scales", weight.scales, scales_dtype == at::kByte || scales_dtype == at::kChar, kScaleCodes, "G, N",
                {G, N});
  } else if (!has_coded_scales(format)) {
    check.sized("scales", weight.scales, is_floating(scales_dtype), kFloating, block_scales ? "G, N/128" : "G, N",
                {G, block_scales ? weight.scales.sym_size(-1) : N});
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
  const bool coded = weight.super_zeros.has_value();
  const std::string_view dtypes = coded ? kBiasCodes : bias ? kFloating : std::string_view(kZeroPoints);
  if (!weight.zeros)
    fail(check.op, "zeros", text(dtypes, " ", check.dimensions("G, N"), " for ", name(format)), "None");
  const at::ScalarType zeros_dtype = weight.zeros->scalar_type();
  const bool dtype_ok = (zeros_dtype == at::kByte && (coded || !bias)) || (is_floating(zeros_dtype) && !coded);
  check.sized("zeros", *weight.zeros, dtype_ok, dtypes, "G, N", {G, N});
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

WeightShape check_weight(const char* op, const WeightArguments& weight, bool stacked) {
  WeightChecker check{{op, weight.b_packed.device()}, stacked};
  const WeightFormat format = find_format(op, weight.weight_format);
  check.words("b_packed", weight.b_packed, codes_per_word(format) == 8 ? "K/8, N" : "K/4, N");
  if (stacked) check.E = weight.b_packed.sym_size(0);
  const c10::SymInt K = weight.b_packed.sym_size(-2) * codes_per_word(format);
  const c10::SymInt N = weight.b_packed.sym_size(-1);
  if (K < kBlockK || N < 1) fail(op, "b_packed", "at least one word and one column", describe(weight.b_packed));
  if (words_per_block(format) > 1 && K % kBlockK != 0) {
    fail(op, "b_packed", "an even number of rows: K is a multiple of 8", describe(weight.b_packed));
  }
  if (check.E < 1) fail(op, "b_packed", "at least one expert", describe(weight.b_packed));
  check_high_plane(check, format, weight, K, N);
  check_group_size(op, format, weight.group_size, K);
  const c10::SymInt G = (K + (weight.group_size - 1)) / weight.group_size;
  check_super(check, format, weight, K, N);
  const bool block_scales = !weight.super_scales && has_block_scales(format, weight, N);
  check_scales_and_zeros(check, format, weight, G, N, block_scales);
  check_global_scale_and_lut(check, format, weight, N);
  check.perm(weight.perm, K);
  return {format, K, N, check.E, block_scales};
}

WeightShape check_dequantize(const WeightArguments& weight, at::ScalarType dtype) {
  WeightShape shape = check_weight("dequantize", weight);
  if (!is_floating(dtype)) fail("dequantize", "dtype", std::string(kFloating), dtype_name(dtype));
  return shape;
}

WeightShape check_embedding(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const char* op = "embedding";
  if (ids.scalar_type() != at::kInt && ids.scalar_type() != at::kLong) {
    fail(op, "ids", "int32 or int64 of any shape", describe(ids));
  }
  WeightShape shape = check_weight(op, weight);
  Checker{op, ids.device()}.on_device("b_packed", weight.b_packed);
  if (!is_floating(dtype)) fail(op, "dtype", std::string(kFloating), dtype_name(dtype));
  return shape;
}

void check_gptq_repack(const Tensor& qweight, const OptionalTensor& perm, int64_t code_bits) {
  const WeightChecker check{{"gptq_repack", qweight.device()}};
  if (code_bits != 4 && code_bits != 8) fail(check.op, "code_bits", "4 or 8", std::to_string(code_bits));
  check.words("qweight", qweight, code_bits == 4 ? "K/8, N" : "K/4, N");
  check.perm(perm, qweight.sym_size(0) * (32 / code_bits));
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
  if (qweight.sym_size(0) % kBlockK != 0) {
    fail(check.op, "qweight", "[K, N/8] with K a multiple of 8", describe(qweight));
  }
}

void check_awq_unpack_zeros(const Tensor& qzeros) {
  WeightChecker{{"awq_unpack_zeros", qzeros.device()}}.words("qzeros", qzeros, "G, N/8");
}

void check_transpose_words(const Tensor& words) {
  WeightChecker{{"transpose_words", words.device()}}.words("words", words, "N, K/8");
}

void check_weight_no_grad(const char* op, const WeightArguments& weight, const OptionalTensor& bias) {
  const auto check = [op](const char* argument, const Tensor& tensor) {
    check_no_grad(op, argument, tensor);
    check_no_tangent(op, argument, tensor);
  };
  check("scales", weight.scales);
  if (weight.zeros) check("zeros", *weight.zeros);
  if (weight.super_scales) check("super_scales", *weight.super_scales);
  if (weight.super_zeros) check("super_zeros", *weight.super_zeros);
  if (weight.global_scale) check("global_scale", *weight.global_scale);
  if (weight.lut) check("lut", *weight.lut);
  if (bias) check("bias", *bias);
}

}  // namespace marlin
