// The operators of one packed weight for MPS: checks tensors, finds a plan, encodes it, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <utility>

#include "csrc/mps/library.h"
#include "csrc/mps/products.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/ops/tensor_views.h"

namespace marlin::mps {
namespace {

// Makes a tensor for a decoded weight. If the weight has a perm, the tensor is filled with zeros: a perm with repeated
// or out-of-range indices leaves some rows of the tensor unwritten.
Tensor empty_weight(const WeightProblem& weight, const at::TensorOptions& options) {
  const std::array<int64_t, 2> sizes{weight.K, weight.N};
  return weight.has_perm ? at::zeros(sizes, options) : at::empty(sizes, options);
}

// Dequantizes the weight to the activations' type and multiplies with PyTorch's own matrix product.
void two_pass(const CompiledPlan& compiled, const WeightProblem& weight, Bindings bindings) {
  Tensor out = bindings[kSlotOut];
  bindings[kSlotOut] = empty_weight(weight, out.options());
  encode(compiled, bindings);
  at::mm_out(out, bindings[kSlotA], bindings[kSlotOut]);
  if (bindings[kSlotBias].defined()) out.copy_(at::add(out.to(at::kFloat), bindings[kSlotBias]));
}

// Finds a plan for the rows and encodes it.
void launch(GemmProblem problem, Bindings bindings, const Tensor& rows, const Tensor& out) {
  const int64_t M = rows.size(0);
  problem.M = static_cast<uint32_t>(M);
  problem.a_row_stride = rows.stride(0);
  problem.vector_aligned_a = is_aligned(rows, 4);
  const std::shared_ptr<const CompiledPlan> compiled = find_plan(problem, rows);
  if (const int64_t first = first_part(compiled->plan, M); first < M) {
    launch(problem, bindings, rows.narrow(0, 0, first), out.narrow(0, 0, first));
    launch(problem, bindings, rows.narrow(0, first, M - first), out.narrow(0, first, M - first));
    return;
  }
  bindings[kSlotA] = rows;
  bindings[kSlotOut] = out;
  if (compiled->plan.dense_product) {
    two_pass(*compiled, problem.weight, std::move(bindings));
  } else {
    encode(*compiled, std::move(bindings));
  }
}

Tensor gemm_mps(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, std::string_view variant) {
  const WeightShape shape = check_gemm(a, weight, bias, variant);
  Bindings bindings;
  GemmProblem problem{.weight = bind_weight("gemm", weight, shape, bindings)};

  at::DimVector sizes(a.sizes());
  sizes.back() = problem.weight.N;
  Tensor out = at::empty(sizes, a.options());
  if (out.numel() == 0) return out;

  const Tensor rows = with_unit_stride(as_rows(a));
  bindings[kSlotBias] = contiguous_or_undefined(bias);
  checked_size("gemm", "rows of a", rows.size(0));
  problem.activations = element_type(rows);
  set_bias(problem, bias);
  problem.variant = variant;
  launch(problem, std::move(bindings), rows, out.view({-1, int64_t{problem.weight.N}}));
  return out;
}

// Compiles the kernels that launch() needs for M contiguous rows.
void compile_rows(GemmProblem problem, int64_t M, const Tensor& like) {
  problem.M = static_cast<uint32_t>(M);
  const int64_t first = first_part(find_plan(problem, like)->plan, M);
  if (first == M) return;
  compile_rows(problem, first, like);
  compile_rows(problem, M - first, like);
}

void compile_gemm_mps(const WeightArguments& weight, const OptionalTensor& bias, int64_t M, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(M >= 1, "torch_marlin_metal::compile_gemm: M: expected at least 1, got ", M);
  checked_size("compile_gemm", "M", M);
  const int64_t K = check_dequantize(weight, dtype).K.expect_int();
  const Tensor row = at::empty({1, K}, weight.b_packed.options().dtype(dtype));
  const WeightShape shape = check_gemm(row, weight, bias, "auto");
  Bindings bindings;
  GemmProblem problem{.weight = bind_weight("compile_gemm", weight, shape, bindings),
                      .a_row_stride = K,
                      .activations = element_type(row),
                      .vector_aligned_a = true,
                      .variant = "auto"};
  set_bias(problem, bias);
  compile_rows(problem, M, row);
}

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

// An id outside the table gives a row of NaN. An error would be better, but to raise one, the host would have to wait
// for the ids.
Tensor embedding_mps(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const WeightShape shape = check_embedding(ids, weight, dtype);
  Bindings bindings;
  EmbeddingProblem problem{.weight = bind_weight("embedding", weight, shape, bindings),
                           .count = checked_size("embedding", "ids", ids.numel()),
                           .wide_ids = ids.scalar_type() == at::kLong};
  at::DimVector sizes(ids.sizes());
  sizes.push_back(problem.weight.K);
  const auto options = weight.scales.options().dtype(dtype);
  // Fills the output with zeros if there is a perm: a perm with repeated or out-of-range indices leaves some elements
  // unwritten.
  Tensor out = problem.weight.has_perm ? at::zeros(sizes, options) : at::empty(sizes, options);
  if (out.numel() == 0) return out;
  bindings[kSlotA] = ids.contiguous();
  bindings[kSlotOut] = out;
  problem.out = element_type(out);
  encode(*find_plan(problem, plan_embedding), std::move(bindings));
  return out;
}

// Runs one of the four kernels in repack.metal: reads [rows, columns] words and writes `out`.
Tensor repack(const char* op, RepackProblem problem, const Tensor& words, Tensor out, const Tensor& perm = {}) {
  if (out.numel() == 0) return out;
  Bindings bindings;
  bindings[kSlotPacked] = words;
  bindings[kSlotPerm] = perm;
  bindings[kSlotOut] = out;
  problem.rows = checked_size(op, "rows", words.size(0));
  problem.columns = checked_size(op, "columns", words.size(1));
  if (problem.kernel == Kernel::awq_repack) problem.rows /= kCodesPerWord;
  problem.has_perm = perm.defined();
  encode(*find_plan(problem, plan_repack), std::move(bindings));
  return out;
}

Tensor gptq_repack_mps(const Tensor& qweight, const OptionalTensor& perm) {
  check_gptq_repack(qweight, perm);
  return repack("gptq_repack", {.kernel = Kernel::gptq_repack}, qweight, at::empty(qweight.sizes(), qweight.options()),
                contiguous_or_undefined(perm));
}

Tensor awq_repack_mps(const Tensor& qweight) {
  check_awq_repack(qweight);
  return repack("awq_repack", {.kernel = Kernel::awq_repack}, qweight,
                at::empty({qweight.size(0) / kCodesPerWord, qweight.size(1) * kCodesPerWord}, qweight.options()));
}

Tensor empty_zeros(const Tensor& qzeros) {
  return at::empty({qzeros.size(0), qzeros.size(1) * kCodesPerWord}, qzeros.options().dtype(at::kByte));
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

// These operators exist on mps only, so their schemas are defined here. No other backend compiles kernels at run time,
// and no other backend has a probe. `doctor` calls the probe.
TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def(weight_schema("compile_gemm(Weight weight, *, Tensor? bias=None, int M, ScalarType dtype) -> ()"));
  m.def("_half_subnormals(Tensor like) -> bool");
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  set_system_reader(metal_system);
  m.impl("compile_gemm", weight_kernel<compile_gemm_mps>);
  m.impl("_half_subnormals", half_subnormals);
  m.impl("gemm", weight_kernel<gemm_mps>);
  m.impl("dequantize", weight_kernel<dequantize_mps>);
  m.impl("embedding", weight_kernel<embedding_mps>);
  m.impl("gptq_repack", gptq_repack_mps);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_mps);
  m.impl("awq_repack", awq_repack_mps);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_mps);
}

}  // namespace marlin::mps
