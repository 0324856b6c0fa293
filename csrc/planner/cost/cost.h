// Predicts the cost of a tiling: applies the model of kernel_cost.h to each of the tiling's dispatches. The planner
// ranks tilings by the predicted time. Nothing is measured here.
#pragma once

#include <vector>

#include "csrc/planner/cost/instruction_counts.h"
#include "csrc/planner/cost/kernel_cost.h"
#include "csrc/planner/tiling.h"

namespace marlin {

struct PlanCost {
  std::vector<DispatchCost> dispatches;  // the plan's dispatches, and the dense product of two_pass
  double seconds = 0;
};

// Each throws std::logic_error if kKernelCounts does not have the kernel.
const KernelCounts& counts_of(Kernel kernel, WeightFormat format, const TileShape& tile);
PlanCost cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);

}  // namespace marlin
