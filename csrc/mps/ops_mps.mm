// The GEMM operators for MPS: checks tensors, finds a plan, encodes it, and returns tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/mps/encoder.h"
#include "csrc/mps/library.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/ops/argument_rules.h"
#include "csrc/planner/commit_policy.h"
#include "csrc/planner/plan_cache.h"

namespace marlin::mps {
namespace {

// Checks that a size fits in a Metal grid. Positions are 32-bit, and the last threadgroup may extend past the size.
uint32_t grid_size(const char* op, const char* name, int64_t size) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(size <= kLargest, "torch_marlin_metal::", op, ": ", name, ": expected at most ", kLargest,
                    " on mps, got ", size);
  return static_cast<uint32_t>(size);
}

bool is_aligned(const Tensor& tensor, int64_t elements) {
  return tensor.storage_offset() % elements == 0;
}

// Returns true if this GPU keeps subnormal halves when it widens them to fp32, which the fastest integer decode needs.
// The first call runs the probe kernel.
bool half_subnormals(const Tensor& like) {
  static const bool answer = [&] {
    Bindings bindings;
    bindings[kSlotPacked] = at::ones({1}, like.options().dtype(at::kInt));
    bindings[kSlotOut] = at::empty({1}, like.options().dtype(at::kInt));
    encode(compile(plan_probe()), bindings);
    return bindings[kSlotOut].item<int32_t>() == 1;
  }();
  return answer;
}

GpuDevice this_gpu(const Tensor& like) {
  (void)commit_seconds();  // raises here, before anything is encoded, if the environment variable is wrong
  GpuDevice device = gpu_device(gpu_name(), gpu_core_count(), gpu_family());
  set_system(device, metal_system());
  device.half_subnormals = half_subnormals(like);
  return device;
}

// Makes a tensor for a decoded weight. If the weight has a perm, the tensor is filled with zeros: a perm with repeated
// or out-of-range indices leaves some rows of the tensor unwritten.
Tensor empty_weight(const WeightProblem& weight, const at::TensorOptions& options) {
  const std::array<int64_t, 2> sizes{weight.K, weight.N};
  return weight.has_perm ? at::zeros(sizes, options) : at::empty(sizes, options);
}

Tensor held(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

WeightProblem bind_weight(const char* op, const WeightTensors& weight, const WeightShape& shape, Bindings& bindings) {
  bindings[kSlotPacked] = weight.b_packed;
  bindings[kSlotScales] = weight.scales.contiguous();
  bindings[kSlotZeros] = held(weight.zeros);
  bindings[kSlotGlobalScale] = held(weight.global_scale);
  bindings[kSlotLut] = held(weight.lut);
  bindings[kSlotPerm] = held(weight.perm);
  const uint32_t K = grid_size(op, "K", shape.K.expect_int());
  return {.format = shape.format,
          .K = K,
          .N = grid_size(op, "N", shape.N.expect_int()),
          .group_size = static_cast<uint32_t>(std::min<int64_t>(weight.group_size, K)),
          .scales = element_type(weight.scales),
          .zeros = weight.zeros ? element_type(*weight.zeros) : ElementType::float16,
          .has_perm = weight.perm.has_value(),
          .has_global_scale = weight.global_scale.has_value(),
          .global_scale_per_column = weight.global_scale && weight.global_scale->numel() > shape.E.expect_int(),
          .vector_aligned = is_aligned(weight.b_packed, 4) && is_aligned(bindings[kSlotScales], 4) &&
                            (!weight.zeros || is_aligned(bindings[kSlotZeros], 4))};
}

GpuDevice without_tensor_units(GpuDevice device) {
  device.tensor_units = false;
  return device;
}

std::atomic<bool> tensor_units_failed{false};

// Returns find(true). If a kernel for tensor units fails on this Mac, a warning names the reason once, and from then on
// "auto" gets find(false), the plan for a GPU without these units. A product that asks for such a kernel by name gets
// the error.
template <typename Find>
std::shared_ptr<const CompiledPlan> with_or_without_tensor_units(std::string_view variant, const Find& find) {
  try {
    if (tensor_units_failed && variant == "auto") return find(false);
    try {
      return find(true);
    } catch (const NoTensorKernel& error) {
      TORCH_CHECK(variant == "auto", "torch_marlin_metal: ", error.what());
      if (!tensor_units_failed.exchange(true)) {
        TORCH_WARN("torch_marlin_metal: products use the other kernels, because ", error.what());
      }
      return find(false);
    }
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

std::shared_ptr<const CompiledPlan> find_plan(const GemmProblem& problem, const Tensor& like) {
  return with_or_without_tensor_units(problem.variant, [&](bool tensor_units) {
    static const GpuDevice gpu = this_gpu(like);
    static auto* plans = new PlanCache<CompiledPlan>(gpu, compile);
    static auto* other_plans = new PlanCache<CompiledPlan>(without_tensor_units(gpu), compile);
    return (tensor_units ? plans : other_plans)->find_plan(problem);
  });
}

std::shared_ptr<const CompiledPlan> find_plan(MoeProblem problem, const Tensor& like) {
  return with_or_without_tensor_units(problem.product.variant, [&](bool tensor_units) {
    static const GpuDevice gpu = this_gpu(like);
    static auto* plans = new LaunchCache<MoeKey, CompiledPlan>;
    static auto* other_plans = new LaunchCache<MoeKey, CompiledPlan>;
    const auto make = [&] {
      if (problem.product.variant == "auto") problem.product.tuned = tuned_variant(problem);
      return compile(plan_moe(problem, tensor_units ? gpu : without_tensor_units(gpu)));
    };
    return (tensor_units ? plans : other_plans)->get(plan_key(problem), make, tuned_generation());
  });
}

// Finds or makes a plan that depends only on its problem, such as the plan of a repack.
template <typename Problem>
std::shared_ptr<const CompiledPlan> find_plan(const Problem& problem, Plan (*plan)(const Problem&)) {
  static auto* plans = new LaunchCache<PlanKey, CompiledPlan>;  // one cache for each kind of problem
  return plans->get(plan_key(problem), [&] { return compile(plan(problem)); });
}

// Dequantizes the weight to the activations' type and multiplies with PyTorch's own matrix product.
void two_pass(const CompiledPlan& compiled, const WeightProblem& weight, Bindings bindings) {
  Tensor out = bindings[kSlotOut];
  bindings[kSlotOut] = empty_weight(weight, out.options());
  encode(compiled, bindings);
  at::mm_out(out, bindings[kSlotA], bindings[kSlotOut]);
  if (bindings[kSlotBias].defined()) out.copy_(at::add(out.to(at::kFloat), bindings[kSlotBias]));
}

// Products of at most this many rows are not divided. The first part of a larger product has a multiple of this number
// of rows, because a dispatch of 64 rows uses the GPU well.
constexpr int64_t kFewestRows = 64;

// A product that would keep the GPU from other work for too long is computed in parts, each with some of the rows.
// Returns the number of rows of the first part, which is M if the product need not be divided.
int64_t first_part(const Plan& plan, int64_t M) {
  if (plan.seconds <= longest_plan_seconds() || M <= kFewestRows) return M;
  return round_up(M / 2, kFewestRows);
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

Tensor gemm_mps(const Tensor& a, const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format,
                int64_t group_size, const OptionalTensor& zeros, const OptionalTensor& global_scale,
                const OptionalTensor& lut, const OptionalTensor& perm, const OptionalTensor& bias,
                c10::string_view variant) {
  const WeightTensors tensors{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const WeightShape shape = check_gemm(a, tensors, bias, variant);
  Bindings bindings;
  GemmProblem problem{.weight = bind_weight("gemm", tensors, shape, bindings)};

  at::DimVector sizes(a.sizes());
  sizes.back() = problem.weight.N;
  Tensor out = at::empty(sizes, a.options());
  if (out.numel() == 0) return out;

  Tensor rows = a.dim() == 2 ? a : a.reshape({-1, int64_t{problem.weight.K}});
  if (rows.stride(1) != 1) rows = rows.contiguous();
  bindings[kSlotBias] = held(bias);
  grid_size("gemm", "rows of a", rows.size(0));
  problem.activations = element_type(rows);
  problem.bias = bias ? element_type(*bias) : ElementType::float16;
  problem.has_bias = bias.has_value();
  problem.variant = variant;
  launch(problem, std::move(bindings), rows, out.view({-1, int64_t{problem.weight.N}}));
  return out;
}

// Finds a plan for the tokens and encodes it. Divides the tokens as launch() divides rows.
void launch_moe(MoeProblem problem, Bindings bindings, const Tensor& a, const Tensor& out) {
  const Tensor ids = bindings[kSlotExpertIds], row_weights = bindings[kSlotRowWeights];
  const int64_t T = ids.size(0);
  problem.product.M = static_cast<uint32_t>(ids.numel());
  problem.product.vector_aligned_a = is_aligned(a, 4);
  bindings[kSlotA] = a;
  bindings[kSlotOut] = out;
  const std::shared_ptr<const CompiledPlan> compiled = find_plan(problem, a);
  const int64_t first = first_part(compiled->plan, T);
  if (first == T) return encode(*compiled, std::move(bindings));
  for (const auto& [start, tokens] : {std::pair(int64_t{0}, first), std::pair(first, T - first)}) {
    bindings[kSlotExpertIds] = ids.narrow(0, start, tokens);
    if (row_weights.defined()) bindings[kSlotRowWeights] = row_weights.narrow(0, start, tokens);
    launch_moe(problem, bindings, a.narrow(0, start, tokens), out.narrow(0, start, tokens));
  }
}

Tensor moe_gemm_mps(const Tensor& a, const Tensor& b_packed, const Tensor& scales, const Tensor& expert_ids,
                    c10::string_view weight_format, int64_t group_size, const OptionalTensor& zeros,
                    const OptionalTensor& global_scale, const OptionalTensor& lut, const OptionalTensor& perm,
                    const OptionalTensor& bias, const OptionalTensor& row_weights, bool reduce,
                    c10::string_view variant) {
  const char* op = "moe_gemm";
  const WeightTensors tensors{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const WeightShape shape = check_moe_gemm(a, tensors, expert_ids, bias, row_weights, variant);
  Bindings bindings;
  MoeProblem problem{.product = {.weight = bind_weight(op, tensors, shape, bindings)}};
  at::DimVector sizes(expert_ids.sizes());
  if (reduce) sizes.pop_back();
  sizes.push_back(problem.product.weight.N);
  if (expert_ids.numel() == 0) return at::zeros(sizes, a.options());
  Tensor out = at::empty(sizes, a.options());

  const Tensor rows = a.stride(-1) == 1 ? a : a.contiguous();
  bindings[kSlotBias] = held(bias);
  bindings[kSlotExpertIds] = expert_ids.contiguous();
  bindings[kSlotRowWeights] = held(row_weights);
  grid_size(op, "expert_ids", expert_ids.numel());
  GemmProblem& product = problem.product;
  product.a_row_stride = rows.stride(0);
  product.activations = element_type(rows);
  product.bias = bias ? element_type(*bias) : ElementType::float16;
  product.has_bias = bias.has_value();
  product.variant = variant;
  problem.a_slot_stride = rows.dim() == 3 ? rows.stride(1) : 0;
  problem.experts = grid_size(op, "experts", b_packed.size(0));
  problem.top_k = grid_size(op, "top_k", expert_ids.size(1));
  problem.wide_ids = expert_ids.scalar_type() == at::kLong;
  problem.row_weights = row_weights ? element_type(*row_weights) : ElementType::float32;
  problem.has_row_weights = row_weights.has_value();
  problem.reduce = reduce;
  launch_moe(problem, std::move(bindings), rows, out);
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

void compile_gemm_mps(const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format, int64_t group_size,
                      const OptionalTensor& zeros, const OptionalTensor& global_scale, const OptionalTensor& lut,
                      const OptionalTensor& perm, const OptionalTensor& bias, int64_t M, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(M >= 1, "torch_marlin_metal::compile_gemm: M: expected at least 1, got ", M);
  grid_size("compile_gemm", "M", M);
  const WeightTensors tensors{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const int64_t K = check_dequantize(tensors, dtype).K.expect_int();
  const Tensor row = at::empty({1, K}, b_packed.options().dtype(dtype));
  const WeightShape shape = check_gemm(row, tensors, bias, "auto");
  Bindings bindings;
  GemmProblem problem{.weight = bind_weight("compile_gemm", tensors, shape, bindings),
                      .a_row_stride = K,
                      .activations = element_type(row),
                      .bias = bias ? element_type(*bias) : ElementType::float16,
                      .has_bias = bias.has_value(),
                      .vector_aligned_a = true,
                      .variant = "auto"};
  compile_rows(problem, M, row);
}

Tensor dequantize_mps(const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format, int64_t group_size,
                      const OptionalTensor& zeros, const OptionalTensor& global_scale, const OptionalTensor& lut,
                      const OptionalTensor& perm, at::ScalarType dtype) {
  const WeightTensors tensors{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const WeightShape shape = check_dequantize(tensors, dtype);
  Bindings bindings;
  DequantizeProblem problem{.weight = bind_weight("dequantize", tensors, shape, bindings)};
  Tensor out = empty_weight(problem.weight, scales.options().dtype(dtype));
  bindings[kSlotOut] = out;
  problem.out = element_type(out);
  encode(*find_plan(problem, plan_dequantize), std::move(bindings));
  return out;
}

// An id outside the table gives a row of NaN. An error would be better, but to raise one, the host would have to wait
// for the ids.
Tensor embedding_mps(const Tensor& ids, const Tensor& b_packed, const Tensor& scales, c10::string_view weight_format,
                     int64_t group_size, const OptionalTensor& zeros, const OptionalTensor& global_scale,
                     const OptionalTensor& lut, const OptionalTensor& perm, at::ScalarType dtype) {
  const WeightTensors tensors{b_packed, scales, weight_format, group_size, zeros, global_scale, lut, perm};
  const WeightShape shape = check_embedding(ids, tensors, dtype);
  Bindings bindings;
  EmbeddingProblem problem{.weight = bind_weight("embedding", tensors, shape, bindings),
                           .count = grid_size("embedding", "ids", ids.numel()),
                           .wide_ids = ids.scalar_type() == at::kLong};
  at::DimVector sizes(ids.sizes());
  sizes.push_back(problem.weight.K);
  const auto options = scales.options().dtype(dtype);
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
  problem.rows = grid_size(op, "rows", words.size(0));
  problem.columns = grid_size(op, "columns", words.size(1));
  if (problem.kernel == Kernel::awq_repack) problem.rows /= kCodesPerWord;
  problem.has_perm = perm.defined();
  encode(*find_plan(problem, plan_repack), std::move(bindings));
  return out;
}

Tensor gptq_repack_mps(const Tensor& qweight, const OptionalTensor& perm) {
  check_gptq_repack(qweight, perm);
  return repack("gptq_repack", {.kernel = Kernel::gptq_repack}, qweight, at::empty(qweight.sizes(), qweight.options()),
                held(perm));
}

Tensor awq_repack_mps(const Tensor& qweight) {
  check_awq_repack(qweight);
  return repack("awq_repack", {.kernel = Kernel::awq_repack}, qweight,
                at::empty({qweight.size(0) / kCodesPerWord, qweight.size(1) * kCodesPerWord}, qweight.options()));
}

Tensor empty_zeros(const Tensor& qzeros) {
  return at::empty({qzeros.size(0), qzeros.size(1) * kCodesPerWord}, qzeros.options().dtype(at::kByte));
}

Tensor gptq_unpack_zeros_mps(const Tensor& qzeros, int64_t checkpoint_version, c10::string_view rule) {
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
  m.def("compile_gemm(Tensor b_packed, Tensor scales, *, str weight_format, int group_size, Tensor? zeros=None, "
        "Tensor? global_scale=None, Tensor? lut=None, Tensor? perm=None, Tensor? bias=None, int M, ScalarType dtype) "
        "-> ()");
  m.def("_half_subnormals(Tensor like) -> bool");
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  set_system_reader(metal_system);
  m.impl("compile_gemm", compile_gemm_mps);
  m.impl("_half_subnormals", half_subnormals);
  m.impl("gemm", gemm_mps);
  m.impl("moe_gemm", moe_gemm_mps);
  m.impl("dequantize", dequantize_mps);
  m.impl("embedding", embedding_mps);
  m.impl("gptq_repack", gptq_repack_mps);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_mps);
  m.impl("awq_repack", awq_repack_mps);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_mps);
}

}  // namespace marlin::mps
