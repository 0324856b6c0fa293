// An analytic model of the time that a tiling takes on a GPU: counted instructions and bytes, divided by the chip's
// rates. It ranks tilings and says what bounds them; it measures nothing. docs/tile-sizing.md lists its assumptions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/planner/instruction_counts.h"
#include "csrc/planner/tiling.h"

namespace marlin {

// Returns the most threads that a threadgroup can have on Apple7 and Apple8 if each thread uses `half_registers`.
uint32_t largest_threadgroup(uint32_t half_registers);

// How many threadgroups and simdgroups of a kernel a core holds at once, and what limits them.
struct Occupancy {
  uint32_t threadgroups;
  uint32_t simdgroups;
  std::string_view limit;  // "threads", "registers" or "threadgroup memory"
};

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family);

// The figures of one dispatch.
//   waves             the number of threadgroups, divided by the number that the GPU holds at once
//   dram_bytes        traffic that no cache serves, such as weights that are evicted between two row blocks
//   l2_bytes          all bytes that simdgroups read and write
//   issue_seconds     the time to issue all instructions except matrix products, spread evenly over all schedulers
//   complex_seconds   the time of the unit for slow integer and complex instructions, which runs beside the schedulers
//   matrix_seconds    the time of the matrix products, spread evenly over all schedulers
//   compute_seconds   the time of the core with the most threadgroups, including load latency that is not hidden
#define MARLIN_DISPATCH_COSTS(X) \
  X(waves)                       \
  X(dram_bytes)                  \
  X(l2_bytes)                    \
  X(matrix_operations)           \
  X(launch_seconds)              \
  X(dram_seconds)                \
  X(l2_seconds)                  \
  X(issue_seconds)               \
  X(complex_seconds)             \
  X(matrix_seconds)              \
  X(compute_seconds)             \
  X(seconds)

// seconds = launch + max(dram, l2, compute) + a twentieth of min(dram, compute). `bound` says what takes longest:
// "launch", "dram", "l2", "issue", "complex", "matrix", "dense" (a dense product), or "occupancy" if simdgroups wait or
// cores idle for more than a fifth of the time.
struct DispatchCost {
  std::string_view kernel{};  // a name from variants.h, or "torch.matmul"
  Occupancy occupancy{};
#define MARLIN_COST_FIELD(field) double field = 0;
  MARLIN_DISPATCH_COSTS(MARLIN_COST_FIELD)
#undef MARLIN_COST_FIELD
  std::string_view bound{};
};

struct PlanCost {
  std::vector<DispatchCost> dispatches;  // the plan's, and the dense product of two_pass
  double seconds = 0;
};

// Each throws std::logic_error if kKernelCounts does not have the kernel.
const KernelCounts& counts_of(Kernel kernel, WeightFormat format, const TileShape& tile);
PlanCost cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);

}  // namespace marlin
