// Plans the products with experts for a GPU. Pure C++: no torch, no Metal.
#pragma once

#include "csrc/planner/plan.h"

namespace marlin {

// Returns the tiling that has the least estimated time. Throws std::invalid_argument if no kernel can compute the
// problem.
Tiling moe_tiling(const MoeProblem& problem, const GpuDevice& device);
// Builds the plan of that tiling. Throws the same.
Plan plan_moe(const MoeProblem& problem, const GpuDevice& device);

}  // namespace marlin
