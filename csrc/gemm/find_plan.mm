#include "csrc/gemm/find_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/gemm/plan_cache.h"
#include "csrc/gemm/probe_plan.h"
#include "csrc/mps/library.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/planner/commit_policy.h"

namespace marlin::mps {
namespace {

// Products of at most this many rows are not divided. The first part of a larger product has a multiple of this number
// of rows, because a dispatch of 64 rows uses the GPU well.
constexpr int64_t kFewestRows = 64;

std::atomic<bool> tensor_units_failed{false};

const GpuDevice& this_gpu(const Tensor& like) {
  static const GpuDevice found = [&] {
    GpuDevice device = gpu();
    set_system(device, metal_system());
    device.half_subnormals = half_subnormals(like);
    return device;
  }();
  return found;
}

GpuDevice without_tensor_units(GpuDevice device) {
  device.tensor_units = false;
  return device;
}

// Returns the reason why this GPU's tensor units cannot be used, or an empty text. The first call runs the probe.
const std::string& tensor_layout_refusal() {
  static const std::string refusal = [] {
    Bindings bindings;
    bindings[kSlotOut] = at::zeros({kTensorProbed}, at::TensorOptions(at::kMPS).dtype(at::kInt));
    encode(compile(plan_tensor_probe()), bindings);
    return marlin::tensor_layout_refusal(bindings[kSlotOut].cpu().data_ptr<int32_t>());
  }();
  return refusal;
}

// Compiles a plan. Throws NoTensorKernel for the reasons of compile(), and also if the plan's kernel for tensor units
// assumes a layout of operands that this GPU does not use.
CompiledPlan prepare(Plan plan) {
  CompiledPlan compiled = compile(std::move(plan));
  for (const Dispatch& dispatch : compiled.plan.dispatches) {
    if (needs_tensor_units(dispatch.instance.kernel) && !tensor_layout_refusal().empty())
      throw NoTensorKernel(tensor_layout_refusal());
  }
  return compiled;
}

template <typename Problem>
std::shared_ptr<const CompiledPlan> cached_plan(const Problem& problem, Planner<Problem> plan, const Tensor& like,
                                                bool tensor_units) {
  using Plans = PlanCache<Problem, CompiledPlan>;
  static auto* plans = new Plans(this_gpu(like), plan, prepare);
  static auto* other_plans = new Plans(without_tensor_units(this_gpu(like)), plan, compile);
  return (tensor_units ? plans : other_plans)->find_plan(problem);
}

template <typename Problem>
std::shared_ptr<const CompiledPlan> find_product(const Problem& problem, NamedVariant variant, Planner<Problem> plan,
                                                 const Tensor& like) {
  try {
    if (tensor_units_failed && variant.is_open()) return cached_plan(problem, plan, like, false);
    try {
      return cached_plan(problem, plan, like, true);
    } catch (const NoTensorKernel& error) {
      TORCH_CHECK(variant.is_open(), "torch_marlin_metal: ", error.what());
      if (!tensor_units_failed.exchange(true)) {
        TORCH_WARN("torch_marlin_metal: products use the other kernels, because ", error.what());
      }
      return cached_plan(problem, plan, like, false);
    }
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace

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

void set_bias(GemmProblem& problem, const OptionalTensor& bias) {
  problem.bias = bias ? element_type(*bias) : ElementType::float16;
  problem.has_bias = bias.has_value();
}

std::shared_ptr<const CompiledPlan> find_plan(const GemmProblem& problem, const Tensor& like) {
  return find_product(problem, problem.variant, plan_gemm, like);
}

std::shared_ptr<const CompiledPlan> find_plan(const MoeProblem& problem, Planner<MoeProblem> plan, const Tensor& like) {
  return find_product(problem, problem.product.variant, plan, like);
}

int64_t first_part(const Plan& plan, int64_t M) {
  if (seconds(plan) <= longest_plan_seconds() || M <= kFewestRows) return M;
  return round_up(M / 2, kFewestRows);
}

}  // namespace marlin::mps
