// The operators of packed weights for MPS: checks the tensors, finds a plan, encodes it, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <utility>

#include "csrc/core/tensor_views.h"
#include "csrc/weights/bind_weight.h"
#include "csrc/weights/gpu_plan.h"

namespace marlin::mps {
namespace {

Tensor dequantize_mps(const WeightArguments& weight, at::ScalarType dtype) {
  const WeightShape shape = check_dequantize(weight, dtype);
  Bindings bindings;
  DequantizeProblem problem{.weight = bind_weight("dequantize", weight, shape, bindings)};
  Tensor out = empty_weight(problem.weight, weight.scales.options().dtype(dtype));
  bindings[kSlotOut] = out;
  problem.out = element_type(out);
  encode(*find_plan(problem, plan_dequantize), std::move(bindings));
  return out;
}

// An id outside the table gives a row of NaN. To raise an error instead, the host would have to wait for the ids.
Tensor embedding_mps(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const WeightShape shape = check_embedding(ids, weight, dtype);
  Bindings bindings;
  EmbeddingProblem problem{.weight = bind_weight("embedding", weight, shape, bindings),
                           .count = checked_size("embedding", "ids", ids.numel()),
                           .wide_ids = ids.scalar_type() == at::kLong};
  at::DimVector sizes(ids.sizes());
  sizes.push_back(problem.weight.K);
  const auto options = weight.scales.options().dtype(dtype);
  // A perm with repeated or out-of-range indices leaves some elements unwritten, so this output starts as zeros.
  Tensor out = problem.weight.has_perm ? at::zeros(sizes, options) : at::empty(sizes, options);
  if (out.numel() == 0) return out;
  bindings[kSlotA] = ids.contiguous();
  bindings[kSlotOut] = out;
  problem.out = element_type(out);
  encode(*find_plan(problem, plan_embedding), std::move(bindings));
  return out;
}

// Runs one of the four kernels of repack.metal: reads `words` [rows, columns], with `thread_rows` rows per thread, and
// writes `out`.
Tensor repack(const char* op, RepackProblem problem, const Tensor& words, Tensor out, const Tensor& perm = {},
              uint32_t thread_rows = 1) {
  if (out.numel() == 0) return out;
  Bindings bindings;
  bindings[kSlotPacked] = words;
  bindings[kSlotPerm] = perm;
  bindings[kSlotOut] = out;
  problem.rows = checked_size(op, "rows", words.size(0)) / thread_rows;
  problem.columns = checked_size(op, "columns", words.size(1));
  problem.thread_bytes =
      static_cast<uint32_t>((words.nbytes() + out.nbytes()) / (size_t{problem.rows} * problem.columns));
  problem.has_perm = perm.defined();
  encode(*find_plan(problem, plan_repack), std::move(bindings));
  return out;
}

Tensor gptq_repack_mps(const Tensor& qweight, const OptionalTensor& perm, int64_t code_bits) {
  check_gptq_repack(qweight, perm, code_bits);
  return repack("gptq_repack", {.kernel = Kernel::gptq_repack, .code_bits = static_cast<uint32_t>(code_bits)}, qweight,
                at::empty(qweight.sizes(), qweight.options()), contiguous_or_undefined(perm));
}

Tensor awq_repack_mps(const Tensor& qweight) {
  check_awq_repack(qweight);
  return repack("awq_repack", {.kernel = Kernel::awq_repack}, qweight,
                at::empty({qweight.size(0) / kNibbles, qweight.size(1) * kNibbles}, qweight.options()), {}, kNibbles);
}

Tensor empty_zeros(const Tensor& qzeros) {
  return at::empty({qzeros.size(0), qzeros.size(1) * kNibbles}, qzeros.options().dtype(at::kByte));
}

Tensor gptq_unpack_zeros_mps(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule) {
  const StoredZeros stored = check_gptq_unpack_zeros(qzeros, checkpoint_version, rule);
  return repack("gptq_unpack_zeros", {.kernel = Kernel::gptq_unpack_zeros, .stored_zeros = stored}, qzeros,
                empty_zeros(qzeros));
}

Tensor awq_unpack_zeros_mps(const Tensor& qzeros) {
  check_awq_unpack_zeros(qzeros);
  return repack("awq_unpack_zeros", {.kernel = Kernel::awq_unpack_zeros}, qzeros, empty_zeros(qzeros));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("dequantize", weight_kernel<dequantize_mps>);
  m.impl("embedding", weight_kernel<embedding_mps>);
  m.impl("gptq_repack", gptq_repack_mps);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_mps);
  m.impl("awq_repack", awq_repack_mps);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_mps);
}

}  // namespace marlin::mps
