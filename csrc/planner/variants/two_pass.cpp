// The plan of two_pass: a kernel decodes the weight, and PyTorch's own product multiplies.
#include "csrc/planner/builder.h"

namespace marlin {

namespace {

constexpr std::array kTiles{GemmTile{GemmVariant::two_pass, Kernel::dequantize, {0, 0, 0}, 0}};

std::optional<Tiling> two_pass_tiling(const GemmTile& row, const GemmProblem&, const GpuDevice&) {
  return Tiling{row};
}

Plan build_two_pass(const Tiling&, const GemmProblem& problem, const GpuDevice& device) {
  Plan plan = plan_dequantize({problem.weight, problem.activations}, device);
  plan.dense_product = true;
  return plan;
}

}  // namespace

constinit const VariantRules two_pass_variant{
    .tiles = kTiles,
    .tiling = two_pass_tiling,
    .build = build_two_pass,
    .threadgroup_bytes = [](const Tiling&, const GemmProblem&, uint32_t) { return 0U; },
    .rounds_weight = true,
};

}  // namespace marlin
