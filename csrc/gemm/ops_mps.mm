// gemm for MPS: checks the tensors, finds a plan, encodes it, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <utility>

#include "csrc/core/tensor_views.h"
#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/find_plan.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/weights/bind_weight.h"

namespace marlin::mps {
namespace {

// Dequantizes the weight to the activations' type and multiplies with PyTorch's own matrix product.
void two_pass(const CompiledPlan& compiled, const WeightProblem& weight, Bindings bindings) {
  Tensor out = bindings[kSlotOut];
  bindings[kSlotOut] = empty_weight(weight, out.options());
  encode(compiled, bindings);
  at::mm_out(out, bindings[kSlotA], bindings[kSlotOut]);
  if (bindings[kSlotBias].defined()) out.add_(bindings[kSlotBias]);
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

Tensor gemm_mps(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias, std::string_view variant,
                OptionalText activations) {
  const WeightShape shape = check_gemm(a, weight, bias, variant, activations);
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
  const WeightShape shape = check_gemm(row, weight, bias, "auto", std::nullopt);
  Bindings bindings;
  GemmProblem problem{.weight = bind_weight("compile_gemm", weight, shape, bindings),
                      .a_row_stride = K,
                      .activations = element_type(row),
                      .vector_aligned_a = true,
                      .variant = "auto"};
  set_bias(problem, bias);
  compile_rows(problem, M, row);
}

}  // namespace

// The schemas of these operators are here, because the operators exist on mps only: no other backend compiles kernels
// at run time or has a probe. `doctor` calls the probe.
TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def(weight_schema("compile_gemm(Weight weight, *, Tensor? bias=None, int M, ScalarType dtype) -> ()"));
  m.def("_half_subnormals(Tensor like) -> bool");
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  set_system_reader(metal_system);
  m.impl("compile_gemm", weight_kernel<compile_gemm_mps>);
  m.impl("_half_subnormals", half_subnormals);
  m.impl("gemm", weight_kernel<gemm_mps>);
}

}  // namespace marlin::mps
