// The GEMM operators for the CPU: checks tensors, passes plain pointers to the kernels, and returns tensors.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "csrc/cpu/api.h"
#include "csrc/cpu/capability.h"
#include "csrc/cpu/huge_pages.h"
#include "csrc/cpu/parallel.h"
#include "csrc/ops/argument_rules.h"
#include "csrc/ops/operators.h"
#include "csrc/ops/tensor_views.h"

namespace marlin::cpu {
namespace {

// Keeps contiguous tensors alive during the kernel call. Only inputs that are not contiguous are copied.
struct StoredWeight {
  Tensor b_packed, scales, zeros, global_scale, lut, perm;
  PackedWeight view;  // describes the weight, or expert 0 if there are several experts
  int64_t experts;

  StoredWeight(const WeightArguments& weight, const WeightShape& shape)
      : b_packed(weight.b_packed),
        scales(weight.scales.contiguous()),
        zeros(contiguous_or_undefined(weight.zeros)),
        global_scale(contiguous_or_undefined(weight.global_scale)),
        lut(contiguous_or_undefined(weight.lut)),
        perm(contiguous_or_undefined(weight.perm)) {
    view.format = shape.format;
    view.K = shape.K.expect_int();
    view.N = shape.N.expect_int();
    view.group_size = weight.group_size;
    view.words = static_cast<const uint32_t*>(b_packed.const_data_ptr());
    view.scales = scales.const_data_ptr();
    view.scales_type = element_type(scales);
    view.zeros = zeros.defined() ? zeros.const_data_ptr() : nullptr;
    view.zeros_type = zeros.defined() ? element_type(zeros) : ElementType::float32;
    view.global_scale = global_scale.defined() ? global_scale.const_data_ptr<float>() : nullptr;
    experts = shape.E.expect_int();
    view.global_scale_stride = global_scale.defined() && global_scale.numel() > experts ? 1 : 0;
    view.lut = lut.defined() ? lut.const_data_ptr<float>() : nullptr;
  }

  const int32_t* perm_data(const char* op) const {
    check_perm(op);
    return perm.defined() ? perm.const_data_ptr<int32_t>() : nullptr;
  }

  void check_perm(const char* op) const {
    if (perm.defined()) check_perm_range(op, perm.const_data_ptr<int32_t>(), perm.numel());
  }

  static bool repeats(const int32_t* perm, int64_t K) {
    std::vector<bool> seen(perm == nullptr ? 0 : static_cast<size_t>(K));
    return !std::all_of(perm, perm + seen.size(), [&](int32_t k) {
      const bool first = !seen[static_cast<size_t>(k)];
      seen[static_cast<size_t>(k)] = true;
      return first;
    });
  }

  // Checks that all indices are in range, because any other index would read memory outside the tensor. Repeated
  // indices are harmless.
  static void check_perm_range(const char* op, const int32_t* perm, int64_t K) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < K; ++k)
      largest = std::max(largest, static_cast<uint32_t>(perm[k]));
    TORCH_CHECK_INDEX(largest < static_cast<uint64_t>(K), "torch_marlin_metal::", op,
                      ": perm: expected indices in [0, K) with K = ", K, ", got ", static_cast<int32_t>(largest));
  }
};

// Reads the precision of mkldnn, PyTorch's backend for matrix products on the CPU, because it can always be read and
// torch.set_float32_matmul_precision sets it too. at::Context::float32MatmulPrecision() would throw if a program has
// set the precision of a single backend.
Float32Precision precision_for(ElementType a_type) {
  if (a_type != ElementType::float32) return Float32Precision::highest;
  const auto asked = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  const bool reduced = asked == at::Float32Precision::TF32 || asked == at::Float32Precision::BF16;
  return reduced ? Float32Precision::reduced : Float32Precision::highest;
}

// Returns true if "two_pass" has an effect, that is, if the weight is rounded to bf16 and multiplied by PyTorch. This
// needs bf16 tensors, and a CPU whose bf16 products make it faster than the kernels that keep the weight exact, at
// least for tables.
bool multiplies_rounded(std::string_view variant, const Tensor& a, const OptionalTensor& bias) {
  if (variant != "two_pass" || a.scalar_type() != at::kBFloat16) return false;
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
    for (OptionalTensor* tensor : {&part.zeros, &part.global_scale})
      *tensor = columns(*tensor);
    part.perm = std::nullopt;
    const Tensor decoded = dequantize_op().call(part.arguments(), at::kBFloat16);
    out.narrow(1, first, count).copy_(bias ? at::addmm(*columns(bias), a, decoded) : at::mm(a, decoded));
  }
}

// Computes gemm if fp32_out is false, else gemm_fp32; `op` is the operator's name.
Tensor multiply(const char* op, const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                std::string_view variant, bool fp32_out) {
  const WeightShape shape = check_gemm(a, weight, bias, variant, op);
  const StoredWeight stored(weight, shape);

  at::DimVector sizes(a.sizes());
  sizes.back() = stored.view.N;
  Tensor out = at::empty(sizes, fp32_out ? a.options().dtype(at::kFloat) : a.options());
  if (out.numel() == 0) return out;

  Tensor rows = a.dim() == 2 ? a : a.reshape({-1, stored.view.K});
  if (!fp32_out && multiplies_rounded(variant, rows, bias)) {
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
  cpu::gemm(arguments, at_parallel(), precision_for(arguments.a_type));
  return out;
}

Tensor gemm_cpu(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, std::string_view variant) {
  return multiply("gemm", a, weight, bias, variant, false);
}

Tensor gemm_fp32_cpu(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias) {
  return multiply("gemm_fp32", a, weight, bias, "auto", true);
}

// Checks the permutations of the experts that are used.
void check_expert_perms(const StoredWeight& weight, const int64_t* ids, int64_t count) {
  std::vector<bool> checked(static_cast<size_t>(weight.experts));
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= weight.experts || checked[static_cast<size_t>(ids[i])]) continue;
    checked[static_cast<size_t>(ids[i])] = true;
    StoredWeight::check_perm_range("moe_gemm", weight.perm.const_data_ptr<int32_t>() + ids[i] * weight.view.K,
                                   weight.view.K);
  }
}

Tensor moe_gemm_cpu(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                    const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                    std::string_view variant) {
  const WeightShape shape = check_moe_gemm(a, weight, expert_ids, bias, row_weights, variant);
  const StoredWeight stored(weight, shape);
  at::DimVector sizes(expert_ids.sizes());
  if (reduce) sizes.pop_back();
  sizes.push_back(stored.view.N);
  if (expert_ids.numel() == 0) return at::zeros(sizes, a.options());
  Tensor out = at::empty(sizes, a.options());

  const Tensor ids = expert_ids.to(at::kLong).contiguous();
  const Tensor rows = with_unit_stride(a);
  const Tensor stored_bias = contiguous_or_undefined(bias);
  const Tensor stored_weights = contiguous_or_undefined(row_weights);
  if (stored.perm.defined()) check_expert_perms(stored, ids.const_data_ptr<int64_t>(), ids.numel());

  MoeGemmArguments arguments{};
  arguments.weight = stored.view;
  arguments.experts = stored.experts;
  arguments.global_scale_expert_stride = stored.view.global_scale_stride == 0 ? 1 : stored.view.N;
  arguments.tokens = ids.size(0);
  arguments.top_k = ids.size(1);
  arguments.expert_ids = ids.const_data_ptr<int64_t>();
  arguments.a = rows.const_data_ptr();
  arguments.a_type = element_type(rows);
  arguments.a_token_stride = rows.stride(0);
  arguments.a_slot_stride = rows.dim() == 3 ? rows.stride(1) : 0;
  arguments.perm = stored.perm.defined() ? stored.perm.const_data_ptr<int32_t>() : nullptr;
  arguments.bias = bias ? stored_bias.const_data_ptr() : nullptr;
  arguments.bias_type = bias ? element_type(stored_bias) : ElementType::float32;
  arguments.row_weights = row_weights ? stored_weights.const_data_ptr() : nullptr;
  arguments.row_weights_type = row_weights ? element_type(stored_weights) : ElementType::float32;
  arguments.reduce = reduce;
  arguments.out = out.mutable_data_ptr();
  cpu::moe_gemm(arguments, at_parallel(), precision_for(arguments.a_type));
  return out;
}

Tensor dequantize_cpu(const WeightArguments& weight, at::ScalarType dtype) {
  const StoredWeight stored(weight, check_dequantize(weight, dtype));
  const int32_t* order = stored.perm_data("dequantize");
  const std::array<int64_t, 2> sizes{stored.view.K, stored.view.N};
  const auto options = weight.scales.options().dtype(dtype);
  // A perm with repeated indices leaves some rows unwritten, so they are zeroed first.
  Tensor out = StoredWeight::repeats(order, stored.view.K) ? at::zeros(sizes, options) : at::empty(sizes, options);
  cpu::dequantize({stored.view, order, out.mutable_data_ptr(), element_type(out)}, at_parallel());
  return out;
}

void check_id_range(const Tensor& ids, int64_t N) {
  const auto [least, largest] = at::aminmax(ids);
  const int64_t low = least.item<int64_t>();
  const int64_t high = largest.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < N, "torch_marlin_metal::embedding: ids: expected values in [0, N) with N = ", N,
                    ", got ", low < 0 ? low : high);
}

Tensor embedding_cpu(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const StoredWeight stored(weight, check_embedding(ids, weight, dtype));
  const int32_t* order = stored.perm_data("embedding");
  at::DimVector sizes(ids.sizes());
  sizes.push_back(stored.view.K);
  const auto options = weight.scales.options().dtype(dtype);
  // A perm with repeated indices leaves some columns unwritten, so they are zeroed first.
  Tensor out = StoredWeight::repeats(order, stored.view.K) ? at::zeros(sizes, options) : at::empty(sizes, options);
  if (ids.numel() == 0) return out;
  check_id_range(ids, stored.view.N);
  const Tensor indices = ids.to(at::kLong).contiguous();
  cpu::embedding({stored.view, order, indices.const_data_ptr<int64_t>(), indices.numel(), out.mutable_data_ptr(),
                  element_type(out)},
                 at_parallel());
  return out;
}

// Returns uninitialised memory for the words of a weight.
Tensor empty_words(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Tensor out = at::empty(sizes, options);
  prefer_huge_pages(out.mutable_data_ptr(), static_cast<int64_t>(out.nbytes()));
  return out;
}

Tensor gptq_repack_cpu(const Tensor& qweight, const OptionalTensor& perm) {
  check_gptq_repack(qweight, perm);
  const Tensor stored = contiguous_or_undefined(perm);
  const int32_t* indices = perm ? stored.const_data_ptr<int32_t>() : nullptr;
  const int64_t K = qweight.size(0) * kCodesPerWord;
  if (indices) StoredWeight::check_perm_range("gptq_repack", indices, K);
  Tensor out = empty_words(qweight.sizes(), qweight.options());
  if (out.numel() == 0) return out;
  cpu::gptq_repack(static_cast<const uint32_t*>(qweight.const_data_ptr()), indices, K, qweight.size(1),
                   static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

Tensor gptq_unpack_zeros_cpu(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule) {
  const StoredZeros stored = check_gptq_unpack_zeros(qzeros, checkpoint_version, rule);
  Tensor out = at::empty({qzeros.size(0), qzeros.size(1) * kCodesPerWord}, qzeros.options().dtype(at::kByte));
  if (out.numel() == 0) return out;
  cpu::gptq_unpack_zeros(static_cast<const uint32_t*>(qzeros.const_data_ptr()), out.size(0), out.size(1), stored,
                         out.mutable_data_ptr<uint8_t>(), at_parallel());
  return out;
}

Tensor awq_repack_cpu(const Tensor& qweight) {
  check_awq_repack(qweight);
  const int64_t K = qweight.size(0);
  const int64_t N = qweight.size(1) * kCodesPerWord;
  Tensor out = empty_words({K / kCodesPerWord, N}, qweight.options());
  if (out.numel() == 0) return out;
  cpu::awq_repack(static_cast<const uint32_t*>(qweight.const_data_ptr()), K, N,
                  static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

Tensor awq_unpack_zeros_cpu(const Tensor& qzeros) {
  check_awq_unpack_zeros(qzeros);
  Tensor out = at::empty({qzeros.size(0), qzeros.size(1) * kCodesPerWord}, qzeros.options().dtype(at::kByte));
  if (out.numel() == 0) return out;
  cpu::awq_unpack_zeros(static_cast<const uint32_t*>(qzeros.const_data_ptr()), out.size(0), out.size(1),
                        out.mutable_data_ptr<uint8_t>(), at_parallel());
  return out;
}

Tensor transpose_words_cpu(const Tensor& words) {
  check_transpose_words(words);
  Tensor out = empty_words({words.size(1), words.size(0)}, words.options());
  if (out.numel() == 0) return out;
  cpu::transpose_words(static_cast<const uint32_t*>(words.const_data_ptr()), words.size(0), words.size(1),
                       static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("gemm", weight_kernel<gemm_cpu>);
  m.impl("gemm_fp32", weight_kernel<gemm_fp32_cpu>);
  m.impl("moe_gemm", weight_kernel<moe_gemm_cpu>);
  m.impl("dequantize", weight_kernel<dequantize_cpu>);
  m.impl("embedding", weight_kernel<embedding_cpu>);
  m.impl("gptq_repack", gptq_repack_cpu);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_cpu);
  m.impl("awq_repack", awq_repack_cpu);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_cpu);
  m.impl("transpose_words", transpose_words_cpu);
}

}  // namespace marlin::cpu
