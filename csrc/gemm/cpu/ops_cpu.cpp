// The products with one packed weight for the CPU: checks tensors, passes plain pointers to the kernels, and returns
// tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>

#include "csrc/core/gemm_variants.h"
#include "csrc/cpu/parallel.h"
#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/cpu/gemm.h"
#include "csrc/gemm/cpu/precision.h"
#include "csrc/planner/device.h"
#include "csrc/weights/cpu/stored_weight.h"
#include "csrc/weights/operators.h"

namespace marlin::cpu {
namespace {

// With fewer rows, decoding takes more of the time than exact products lose.
constexpr int64_t kRoundedMinRows = 128;

// Returns true if the weight is rounded and multiplied by PyTorch in bf16: if the variant or the option for decoded
// weights says so. This needs bf16 tensors, and a CPU with fast bf16 products: elsewhere the kernels with exact weights
// are faster.
bool multiplies_rounded(std::string_view variant, const Tensor& a, int64_t N, const OptionalTensor& bias) {
  if (a.scalar_type() != at::kBFloat16) return false;
  const std::optional<GemmVariant> named = variant_of(variant);
  const auto decoded = static_cast<uint64_t>(2 * a.size(1) * N);
  const bool allowed = !named && a.size(0) >= kRoundedMinRows && decoded <= decoded_bytes();
  if (!allowed && !(named && rounds_weight(*named))) return false;
  if (bias && bias->scalar_type() != at::kBFloat16) return false;
  return capability().isa == Isa::amx || (capability().isa == Isa::avx512 && detected().fast_bf16_dot);
}

// Decodes some columns of the weight at a time, rounded to bf16, and multiplies them by PyTorch's product.
void multiply_rounded(const Tensor& rows, const WeightArguments& weight, const OptionalTensor& bias,
                      const Tensor& out) {
  constexpr int64_t kPartBytes = int64_t{4} << 20;  // stays in the cache
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Tensor a = weight.perm ? rows.index_select(1, weight.perm->to(at::kLong)) : rows;
  const int64_t N = out.size(1);
  const int64_t width = std::clamp<int64_t>(kPartBytes / (2 * a.size(1)) / 64 * 64, 64, std::max<int64_t>(N, 64));
  for (int64_t first = 0; first < N; first += width) {
    const int64_t count = std::min(width, N - first);
    const auto columns = [&](const OptionalTensor& tensor) {
      const bool has_columns = tensor && tensor->dim() > 0 && tensor->size(-1) == N && tensor->numel() > 1;
      return has_columns ? OptionalTensor(tensor->narrow(-1, first, count).contiguous()) : tensor;
    };
    OwnedWeight part = weight.own();
    for (Tensor* tensor : {&part.b_packed, &part.scales})
      *tensor = *columns(*tensor);
    for (OptionalTensor* tensor :
         {&part.zeros, &part.super_scales, &part.super_zeros, &part.global_scale, &part.b_high})
      *tensor = columns(*tensor);
    part.perm = std::nullopt;
    const Tensor decoded = dequantize_op().call(part.arguments(), at::kBFloat16);
    out.narrow(1, first, count).copy_(bias ? at::addmm(*columns(bias), a, decoded) : at::mm(a, decoded));
  }
}

// Raises if this machine has no kernels for activations of 8 bits.
void check_int8(const char* op, WeightFormat format) {
  const Parallel parallel = at_parallel();
  if (has_int8(this_machine(parallel), format)) return;
  fail(op, "activations",
       text("None for ", name(format), " on this CPU: 'int8' needs AVX2 or, for codes of 4 bits, Arm's dot products"),
       text("'int8' with the instruction set ", isa_name(capability().isa)));
}

// Computes gemm if fp32_out is false, else gemm_fp32; `op` is the operator's name.
Tensor multiply(const char* op, const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                std::string_view variant, OptionalText activations, bool fp32_out) {
  const WeightShape shape = check_gemm(a, weight, bias, variant, activations, op);
  if (activations) check_int8(op, shape.format);
  const StoredWeight stored(weight, shape);

  at::DimVector sizes(a.sizes());
  sizes.back() = stored.view.N;
  Tensor out = at::empty(sizes, fp32_out ? a.options().dtype(at::kFloat) : a.options());
  if (out.numel() == 0) return out;

  Tensor rows = a.dim() == 2 ? a : a.reshape({-1, stored.view.K});
  if (!fp32_out && !activations && multiplies_rounded(variant, rows, stored.view.N, bias)) {
    stored.check_perm(op);
    const std::array<int64_t, 2> flat{rows.size(0), stored.view.N};
    multiply_rounded(rows, weight, bias, out.view(flat));
    return out;
  }
  if (rows.stride(1) != 1) rows = rows.contiguous();
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
  cpu::gemm(arguments, at_parallel(), activations ? Precision::int8 : precision_for(arguments.a_type));
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
