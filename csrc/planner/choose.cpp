// Plans a problem: makes a tiling for each tile that can compute it, chooses the one with the least estimated time, and
// builds a plan for that.
#include "csrc/planner/builder.h"
#include "csrc/planner/decisions.h"
#include "csrc/planner/estimate.h"

namespace marlin {

namespace {

// Returns the best of the tilings that `eligible` admits, or null if it admits none.
template <typename Eligible>
const Tiling* best_of(const std::vector<Tiling>& tilings, const GemmProblem& problem, const GpuDevice& device,
                      const Eligible& eligible) {
  const Tiling* found = nullptr;
  double least = 0;
  for (const Tiling& tiling : tilings) {
    if (!eligible(tiling)) continue;
    const double seconds = estimate(tiling, problem, device).total();
    if (found != nullptr && seconds >= least) continue;
    found = &tiling;
    least = seconds;
  }
  return found;
}

}  // namespace

const VariantRules& rules_of(GemmVariant variant) {
#define MARLIN_VARIANT_RULES(name) &name##_variant,
  static constexpr std::array<const VariantRules*, kGemmVariants.size()> rules{
      MARLIN_GEMM_VARIANTS(MARLIN_VARIANT_RULES)};
#undef MARLIN_VARIANT_RULES
  return *rules.at(static_cast<size_t>(variant));
}

std::span<const GemmTile> gemm_tiles() {
  static const std::vector<GemmTile> tiles = [] {
    std::vector<GemmTile> all;
    for (size_t i = 0; i < kGemmVariants.size(); ++i) {
      const auto own = rules_of(static_cast<GemmVariant>(i)).tiles;
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }();
  return tiles;
}

bool rounds_weight(GemmVariant variant) {
  return rules_of(variant).rounds_weight;
}

bool computes_experts(GemmVariant variant) {
  return rules_of(variant).add_expert_tilings != nullptr;
}

std::string expert_variants() {
  std::string text = "auto";
  std::string_view last;
  for (size_t i = 0; i < kGemmVariants.size(); ++i) {
    if (!computes_experts(static_cast<GemmVariant>(i))) continue;
    if (!last.empty()) text.append(", ").append(last);
    last = kGemmVariants.at(i);
  }
  return text.append(" or ").append(last);
}

uint32_t threadgroup_bytes(const Tiling& tiling, const GemmProblem& problem, uint32_t rows) {
  return rules_of(tiling.variant).threadgroup_bytes(tiling, problem, rows);
}

std::vector<Tiling> gemm_tilings(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  if (problem.M == 0) refuse("gemm", "M", "at least 1", "0");
  check_weight("gemm", weight);
  check_variant("gemm", problem, device);
  std::vector<Tiling> tilings;
  for (const GemmTile& row : gemm_tiles()) {
    if (!fits(row, problem.activations) || (!problem.variant.is_auto() && !problem.variant.names_row(row))) continue;
    if (const auto tiling = rules_of(row.variant).tiling(row, problem, device)) tilings.push_back(*tiling);
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
    found = best_of(tilings, problem, device, [&](const Tiling& tiling) { return problem.tuned.names_row(tiling); });
  }
  if (found == nullptr) {
    found =
        best_of(tilings, problem, device, [](const Tiling& tiling) { return rules_of(tiling.variant).row_unit != 0; });
  }
  if (found == nullptr) {
    found = best_of(tilings, problem, device, [](const Tiling&) { return true; });
  }
  return *found;
}

std::string reason(const Tiling& chosen, const GemmProblem& problem, const GpuDevice& device) {
  if (!problem.variant.is_auto()) return "the call names its variant";
  if (problem.tuned.names_row(chosen)) return "the tuner measured it as the fastest";
  const Arithmetic type = arithmetic(problem.activations, family_of(*device.chip));
  return std::string(find_decision(chosen.variant, type, problem.weight.format)->reason);
}

Plan build_plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  Plan plan = rules_of(tiling.variant).build(tiling, problem, device);
  const Estimate found = estimate(tiling, problem, device);
  for (size_t i = 0; i < plan.dispatches.size(); ++i)
    plan.dispatches[i].seconds = found.seconds.at(i);
  return plan;
}

Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device) {
  const std::vector<Tiling> tilings = gemm_tilings(problem, device);
  return build_plan(choose(tilings, problem, device), problem, device);
}

}  // namespace marlin
