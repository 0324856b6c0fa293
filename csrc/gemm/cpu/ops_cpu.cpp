// gemm and gemm_fp32 for the CPU: checks the tensors, passes plain pointers to the kernels, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "csrc/core/gemm_variants.h"
#include "csrc/core/tensor_views.h"
#include "csrc/cpu/parallel.h"
#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/cpu/gemm.h"
#include "csrc/gemm/cpu/precision.h"
#include "csrc/planner/device.h"
#include "csrc/weights/cpu/stored_weight.h"

namespace marlin::cpu {
namespace {

// Returns true if `variant`, or the limit of decoded weights for "auto", permits rounding of the weight to bf16.
bool may_round(std::string_view variant, int64_t M, const PackedWeight& weight) {
  if (M < kRoundedMinRows) return false;
  const NamedVariant named(variant);
  const auto bytes = static_cast<uint64_t>(2 * weight.K * weight.N);
  return named.is_rounded() || (named.is_open() && bytes <= decode_limits().automatic);
}

// Raises if this machine has no kernels for activations of 8 bits.
void check_int8(const char* op, const Machine& machine, WeightFormat format) {
  if (has_int8(machine, format)) return;
  fail(op, "activations",
       text("None for ", name(format), " on this CPU: 'int8' needs AVX2 or, for codes of 4 bits, Arm's dot products"),
       text("'int8' with the instruction set ", isa_name(machine.isa)));
}

// Computes gemm, or gemm_fp32 if fp32_out is true. `op` is the operator's name.
Tensor multiply(const char* op, const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                std::string_view variant, OptionalText activations, bool fp32_out) {
  const WeightShape shape = check_gemm(a, weight, bias, variant, activations, op);
  const Parallel parallel = at_parallel();
  const Machine machine = this_machine(parallel);
  if (activations) check_int8(op, machine, shape.format);
  const StoredWeight stored(weight, shape);

  at::DimVector sizes(a.sizes());
  sizes.back() = stored.view.N;
  Tensor out = at::empty(sizes, fp32_out ? a.options().dtype(at::kFloat) : a.options());
  if (out.numel() == 0) return out;

  const Tensor rows = with_unit_stride(as_rows(a));
  const Tensor stored_bias = contiguous_or_undefined(bias);

  GemmArguments arguments{};
  arguments.weight = stored.view;
  arguments.M = rows.size(0);
  arguments.a = rows.const_data_ptr();
  arguments.a_type = element_type(rows);
  arguments.a_row_stride = rows.stride(0);
  arguments.perm = stored.perm_data(op);
  arguments.bias = bias ? stored_bias.const_data_ptr() : nullptr;
  arguments.bias_type = bias ? element_type(stored_bias) : ElementType::float32;
  arguments.out = out.mutable_data_ptr();
  arguments.fp32_out = fp32_out;
  arguments.rounds = !fp32_out && !activations && may_round(variant, rows.size(0), stored.view);
  gemm_on(machine, arguments, parallel, activations ? Precision::int8 : precision_for(arguments.a_type));
  return out;
}

Tensor gemm_cpu(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, std::string_view variant,
                OptionalText activations) {
  return multiply("gemm", a, weight, bias, variant, activations, false);
}

Tensor gemm_fp32_cpu(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                     OptionalText activations) {
  return multiply("gemm_fp32", a, weight, bias, "auto", activations, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("gemm", weight_kernel<gemm_cpu>);
  m.impl("gemm_fp32", weight_kernel<gemm_fp32_cpu>);
}

}  // namespace marlin::cpu
