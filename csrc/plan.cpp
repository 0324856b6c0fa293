// The planner's entry points. plan_<variant>.cpp say how each variant can compute a product, plan_choose.cpp takes one.
#include <functional>
#include <set>

#include "plan_parts.h"

namespace marlin {

namespace {

struct Variant {
  std::string_view name;
  AddCandidates* add;
};

constexpr std::array kVariants{
    Variant{"gemv", add_gemv},
    Variant{"fused", add_fused},
    Variant{"double_buffered", add_double_buffered},
    Variant{"single_stage", add_single_stage},
    Variant{"striped", add_striped},
    Variant{"two_pass", add_two_pass},
};

constexpr auto kVariantNames = [] {
  std::array<std::string_view, kVariants.size()> names;
  std::ranges::transform(kVariants, names.begin(), &Variant::name);
  return names;
}();

void check(const WeightProblem& weight) {
  require(weight.N > 0 && weight.K > 0 && weight.K % kCodesPerWord == 0, "plan: N and K / 8 must be positive");
  require(weight.group_size > 0 && group_size(weight) % kCodesPerWord == 0, "plan: group_size must be a multiple of 8");
  require(uint64_t{ceil_divide(weight.K, group_size(weight))} * weight.N <= UINT32_MAX, "plan: 2^32 scales or more");
}

}  // namespace

std::span<const std::string_view> gemm_variants() {
  return kVariantNames;
}

std::string name(const Candidate& candidate) {
  const std::string variant(candidate.variant);
  return candidate.tile == TileShape{} ? variant : variant + ":" + name(candidate.tile);
}

bool is_gemm_variant(std::string_view variant, ElementType activations) {
  if (variant == "auto") return true;
  static const auto names = [] {
    std::array<std::set<std::string, std::less<>>, 3> found;
    for (size_t type = 0; type < found.size(); ++type) {
      // The numbers of rows that bring every tile of the ladder.
      for (uint32_t M : {1U, 2U, 3U, 4U, 8U, 16U, 24U, 32U}) {
        const GemmProblem problem{.weight = {.K = 64, .N = 64, .group_size = 32},
                                  .M = M,
                                  .a_row_stride = 64,
                                  .activations = static_cast<ElementType>(type)};
        for (const Candidate& candidate : gemm_candidates(problem, {})) {
          found[type].emplace(candidate.variant);
          found[type].insert(name(candidate));
        }
      }
    }
    return found;
  }();
  return names.at(static_cast<size_t>(activations)).contains(variant);
}

std::vector<Candidate> gemm_candidates(const GemmProblem& problem, const GpuDevice& device) {
  require(problem.M > 0, "plan: M must be positive");
  check(problem.weight);
  const std::string_view wanted = problem.variant;
  const std::string_view wanted_variant = wanted.substr(0, wanted.find(':'));
  std::vector<Candidate> candidates;
  for (const Variant& variant : kVariants) {
    if (wanted == "auto" || wanted_variant == variant.name) variant.add(candidates, problem, device);
  }
  if (wanted_variant != wanted) std::erase_if(candidates, [&](const Candidate& c) { return name(c) != wanted; });
  if (candidates.empty()) throw std::invalid_argument("plan: no kernel variant '" + std::string(wanted) + "'");
  return candidates;
}

void add_two_pass(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice&) {
  Plan plan = plan_dequantize({problem.weight, problem.activations});
  plan.dense_product = true;
  candidates.push_back({"two_pass", {}, std::move(plan)});
}

Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device) {
  return choose(gemm_candidates(problem, device), problem, device).plan;
}

Plan plan_dequantize(const DequantizeProblem& problem) {
  const WeightProblem& weight = problem.weight;
  check(weight);
  return {.dispatches = {{.kernel = Kernel::dequantize,
                          .function = host_name(Kernel::dequantize, weight.format, problem.out),
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.N, weight.K / kCodesPerWord),
                          .threads = kElementwiseThreads,
                          .params = DequantizeParams{weight.N, weight.K, group_size(weight), 0}}}};
}

Plan plan_repack(const RepackProblem& problem) {
  require(problem.rows > 0 && problem.columns > 0, "plan: rows and columns must be positive");
  require(info(problem.kernel).library == "repack", "plan: not a kernel of the library repack");
  Dispatch dispatch{
      .kernel = problem.kernel,
      .function = host_name(problem.kernel, WeightFormat::uint4b8, ElementType::float16),
      .grid = elementwise_grid(problem.columns, problem.rows),
      .threads = kElementwiseThreads,
      .params = RepackParams{problem.rows, problem.columns, static_cast<int32_t>(problem.stored_zeros), 0}};
  dispatch.constants[kConstantHasPerm] = problem.has_perm;
  return {.dispatches = {std::move(dispatch)}};
}

Plan plan_probe() {
  return {.dispatches = {{.kernel = Kernel::probe_half_subnormals,
                          .function = std::string(info(Kernel::probe_half_subnormals).name)}}};
}

}  // namespace marlin
