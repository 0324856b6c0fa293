// Predicts the cost of a tiling: applies the model of kernel_cost.h to each of the tiling's dispatches. The planner
// ranks tilings by the predicted time. Nothing is measured here.
#pragma once

#include <vector>

#include "csrc/planner/cost/activation_counts.h"
#include "csrc/planner/cost/kernel_cost.h"
#include "csrc/planner/tiling.h"

namespace marlin {

struct PlanCost {
  std::vector<DispatchCost> dispatches;  // the plan's dispatches, and the dense product of two_pass
  double seconds = 0;
};

// Each throws std::logic_error if the kernel has not been counted.
const KernelCounts& counts_of(const GemmTile& row, const GemmProblem& problem, const GpuFamily& family);
PlanCost cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);

// Returns the load of one launch of a tiling's product kernel, without its bytes.
KernelLoad product_load(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks,
                        const GpuDevice& device);

// Returns the bytes of a weight with its scales, zero points and permutation.
double weight_bytes(const WeightProblem& weight);

// Returns the cost of a kernel with one thread per element, which depends on memory and launch time only.
DispatchCost elementwise_cost(Kernel kernel, Extent grid, double read, double written, const GemmProblem& problem,
                              const GpuDevice& device);

}  // namespace marlin
