// Plans moe_gemm for a GPU. Uses neither torch nor Metal.
#pragma once

#include "csrc/planner/plan.h"

namespace marlin {

// Returns the tiling with the least estimated time. Throws std::invalid_argument if no kernel can compute the problem.
Tiling moe_tiling(const MoeProblem& problem, const GpuDevice& device);
// Builds the plan of moe_tiling's result. Throws the same errors as moe_tiling.
Plan plan_moe(const MoeProblem& problem, const GpuDevice& device);

}  // namespace marlin
