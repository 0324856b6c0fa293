// moe_gemm for the CPU: checks the tensors, passes plain pointers to the kernels, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "csrc/cpu/parallel.h"
#include "csrc/experts/argument_rules.h"
#include "csrc/experts/cpu/moe_gemm.h"
#include "csrc/gemm/cpu/precision.h"
#include "csrc/weights/cpu/stored_weight.h"

namespace marlin::cpu {
namespace {

// Checks the permutations of the experts that occur in `ids`.
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

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("moe_gemm", weight_kernel<moe_gemm_cpu>);
}

}  // namespace marlin::cpu
