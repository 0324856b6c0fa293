// An analytic model of what a plan costs on a GPU: counted instructions and bytes against the chip's rates. It ranks
// plans and says what bounds them; it measures nothing. docs/tile-sizing.md lists what it assumes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernel_counts.h"
#include "plan.h"

namespace marlin {

// The largest threadgroup that a kernel with so many half-registers a thread can have, on Apple7 and Apple8.
uint32_t largest_threadgroup(uint32_t half_registers);

// How much of a kernel a core holds at once.
struct Occupancy {
  uint32_t threadgroups;
  uint32_t simdgroups;
  std::string_view limit;  // "threads", "registers" or "threadgroup memory"
};

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family);

// Of one dispatch.
//   waves              threadgroups over those that the GPU holds at once
//   dram_bytes         what no cache serves; weights that several row blocks read, if they outlive the caches
//   l2_bytes           what simdgroups read and write
//   issue, complex, matrix_seconds   of the instructions, spread evenly over all schedulers; complex runs beside the
//   rest compute_seconds    of the core with most threadgroups, with the load latency that its simdgroups do not hide
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

// seconds = launch + max(dram, l2, compute) + a twentieth of min(dram, compute). bound: "launch", "dram", "l2",
// "issue", "complex", "matrix", "dense" for a dense product, or "occupancy" where simdgroups wait or cores idle for
// more than a fifth of the time.
struct DispatchCost {
  std::string_view kernel{};  // of variants.h, or "torch.matmul"
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

// Throws std::logic_error for a kernel that kKernelCounts does not have.
PlanCost cost(const Candidate& candidate, const GemmProblem& problem, const GpuDevice& device);

}  // namespace marlin
