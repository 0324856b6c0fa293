// Estimates the time of products on a GPU from the bytes that they move and the clocks of the busiest core. The planner
// compares row blocks and splits of K by these estimates (lab/notes/tile-sizing.md).
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/rates.h"
#include "csrc/planner/tiling.h"

namespace marlin {

// Returns the number of 16-bit registers per thread if a threadgroup of the kernel computes `rows` rows.
uint32_t half_registers(const GemmTile& tile, const GemmProblem& problem, uint32_t rows, const GpuDevice& device);

// The estimated cost of a plan: the time of each dispatch (for two_pass also of PyTorch's product), and how full the
// cores are during the products.
struct Estimate {
  std::vector<double> seconds;
  double in_flight = 0;  // simdgroups that a core holds on average

  double total() const;
};

Estimate estimate(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);
// The dispatches are moe_sort (if the tiling needs it), the product, and moe_reduce (if the problem needs it).
Estimate estimate(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device);

// The expected numbers if each token chooses its experts at random: `experts` that have rows, and `blocks`, the sum of
// their row blocks.
struct Routing {
  double experts = 0;
  double blocks = 0;
};
Routing expected_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows);

// Returns the bytes of a weight including its scales, zero points and permutation.
double weight_bytes(const WeightProblem& weight);

}  // namespace marlin
