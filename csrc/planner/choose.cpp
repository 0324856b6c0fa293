// Plans a problem: makes a tiling for each tile that can compute it, chooses the cheapest, and builds a plan for that.
#include "csrc/planner/builder.h"
#include "csrc/planner/cost/cost.h"

namespace marlin {

namespace {

std::optional<Tiling> two_pass_tiling(const GemmTile& row, const GemmProblem&, const GpuDevice&) {
  return Tiling{row};
}

Plan build_two_pass(const Tiling&, const GemmProblem& problem, const GpuDevice&) {
  Plan plan = plan_dequantize({problem.weight, problem.activations});
  plan.dense_product = true;
  return plan;
}

struct VariantFunctions {
  MakeTiling* tiling;
  BuildPlan* build;
};

const VariantFunctions& functions_of(GemmVariant variant) {
  static constexpr std::array<VariantFunctions, kGemmVariants.size()> table{{
      {gemv_tiling, build_gemv},
      {fused_tiling, build_fused},
      {staged_tiling, build_staged},
      {staged_tiling, build_staged},
      {striped_tiling, build_striped},
      {tensor_tiling, build_tensor},
      {two_pass_tiling, build_two_pass},
  }};
  return table[static_cast<size_t>(variant)];
}

// Returns true if "auto" may take the variant without a measurement. two_pass rounds the weights. No time of tensor is
// known on any GPU.
bool is_automatic(GemmVariant variant) {
  return variant != GemmVariant::two_pass && variant != GemmVariant::tensor;
}

// Returns the cheapest of the tilings that `eligible` admits, or null if it admits none.
template <typename Eligible>
const Tiling* cheapest(const std::vector<Tiling>& tilings, const GemmProblem& problem, const GpuDevice& device,
                       const Eligible& eligible) {
  const Tiling* found = nullptr;
  double least = 0;
  for (const Tiling& tiling : tilings) {
    if (!eligible(tiling)) continue;
    const double seconds = cost(tiling, problem, device).seconds;
    if (found != nullptr && seconds >= least) continue;
    found = &tiling;
    least = seconds;
  }
  return found;
}

}  // namespace

std::vector<Tiling> gemm_tilings(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  if (problem.M == 0) refuse("gemm", "M", "at least 1", "0");
  check_weight("gemm", weight);
  check_variant("gemm", problem, device);
  std::vector<Tiling> tilings;
  for (const GemmTile& row : kGemmTiles) {
    if (row.variant == GemmVariant::tensor && !has_tensor_kernel(problem, device)) continue;
    if (!fits(row, problem.activations) || (!problem.variant.is_auto() && !problem.variant.names_row(row))) continue;
    if (const auto tiling = functions_of(row.variant).tiling(row, problem, device)) tilings.push_back(*tiling);
  }
  if (tilings.empty()) {
    refuse("gemm", "variant",
           "one that has a kernel for M=" + std::to_string(problem.M) + " N=" + std::to_string(weight.N) +
               " K=" + std::to_string(weight.K) + " and " + std::string(name(problem.activations)) + " activations",
           "'" + problem.variant.text() + "'");
  }
  return tilings;
}

const Tiling& choose(const std::vector<Tiling>& tilings, const GemmProblem& problem, const GpuDevice& device) {
  const Tiling* found = nullptr;
  if (!problem.tuned.is_auto()) {
    found = cheapest(tilings, problem, device, [&](const Tiling& tiling) { return problem.tuned.names_row(tiling); });
  }
  if (found == nullptr) {
    found = cheapest(tilings, problem, device, [](const Tiling& tiling) { return is_automatic(tiling.variant); });
  }
  return found == nullptr ? tilings.front() : *found;
}

Plan build_plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  Plan plan = functions_of(tiling.variant).build(tiling, problem, device);
  const PlanCost predicted = cost(tiling, problem, device);
  for (size_t i = 0; i < plan.dispatches.size(); ++i)
    plan.seconds += predicted.dispatches.at(i).seconds;
  return plan;
}

Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device) {
  const std::vector<Tiling> tilings = gemm_tilings(problem, device);
  return build_plan(choose(tilings, problem, device), problem, device);
}

}  // namespace marlin
