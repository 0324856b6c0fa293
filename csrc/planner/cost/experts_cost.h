// Predicts the cost of a product with experts.
#pragma once

#include <vector>

#include "csrc/planner/cost/cost.h"

namespace marlin {

// How many experts have rows, and how many blocks of rows these experts have together.
struct Routing {
  double experts = 0;
  double blocks = 0;
  std::vector<double> blocks_by_rows;  // element r - 1: those of the blocks that have r rows
};

// Returns the expected values if each token chooses its experts at random and all experts are equally likely. Nobody
// knows the routing when a plan is made.
Routing expected_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows);

// Returns the cost of each dispatch of the plan: moe_sort (if the tiling needs it), then the products, then moe_reduce
// (only if the problem needs it). Surplus threadgroups, which have no rows, cost nothing.
PlanCost experts_cost(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device);

}  // namespace marlin
