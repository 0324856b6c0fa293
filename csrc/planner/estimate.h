// Estimates the time of dispatches on a GPU: bytes and clocks over the chip's rates. The planner compares blocks of rows
// and splits of K by it (docs/inside/tile-sizing.md), and decides with it when to commit.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/planner/tiling.h"

namespace marlin {

// The time from the end of one small dispatch to the end of the next, if the next one depends on the first. Published
// figures are 3 to 10 us (docs/inside/tile-sizing.md).
inline constexpr double kDispatchSeconds = 6e-6;

// How many threadgroups and simdgroups of a kernel a core holds at once.
struct Occupancy {
  uint32_t threadgroups;
  uint32_t simdgroups;
};

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family);

// Returns the 16-bit registers of a thread of the kernel, if a threadgroup computes `rows` rows.
uint32_t half_registers(const GemmTile& tile, const GemmProblem& problem, uint32_t rows, const GpuDevice& device);

// The time of each dispatch of a plan, and how full the cores are while the products are computed.
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

// Returns the time of a kernel that only moves `bytes` from and to memory.
double traffic_seconds(double bytes, const GpuDevice& device);

}  // namespace marlin
