// Estimates the time of products on a GPU: bytes over the rate of memory, and clocks of the busiest core, from the
// table of decisions. The planner compares blocks of rows and splits of K by it (lab/notes/tile-sizing.md).
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/rates.h"
#include "csrc/planner/tiling.h"

namespace marlin {

// Returns the 16-bit registers of a thread of the kernel, if a threadgroup computes `rows` rows.
uint32_t half_registers(const GemmTile& tile, const GemmProblem& problem, uint32_t rows, const GpuDevice& device);

// The time of each dispatch of a plan, and of PyTorch's product in two_pass, and how full the cores are while the
// products are computed.
struct Estimate {
  std::vector<double> seconds;
  double in_flight = 0;  // simdgroups that a core holds on average

  double total() const;
};

Estimate estimate(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);
// The dispatches are moe_sort (if the tiling needs it), the products, and moe_reduce (if the problem needs it).
Estimate estimate(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device);

// How many experts have rows, and how many blocks of rows they have together, if each token chooses its experts at
// random.
struct Routing {
  double experts = 0;
  double blocks = 0;
};
Routing expected_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows);

// Returns the bytes of a weight with its scales, zero points and permutation.
double weight_bytes(const WeightProblem& weight);

}  // namespace marlin
