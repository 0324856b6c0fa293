// An analytic model of the time that a kernel takes on a GPU: counted instructions and bytes, divided by the chip's
// rates. The model does not depend on this package's kernels, so benchmarks/metal/published.py can compare it with
// published times of other kernels. docs/inside/tile-sizing.md lists the model's assumptions.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/planner/device.h"

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
//   in_flight         the simdgroups that a core holds on average, at most as many as fit on it
//   dram_bytes        traffic that no cache serves, such as weights that are evicted between two row blocks
//   l2_bytes          all bytes that simdgroups read and write
//   issue_seconds     the time to issue all instructions except matrix products, spread evenly over all schedulers
//   complex_seconds   the time of the unit for slow integer and complex instructions, which runs beside the schedulers
//   matrix_seconds    the time of the matrix products, spread evenly over all schedulers
//   compute_seconds   the time of the core with the most threadgroups, including load latency that is not hidden
#define MARLIN_DISPATCH_COSTS(X) \
  X(waves)                       \
  X(in_flight)                   \
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
  std::string_view kernel{};  // a name from kernel_list.h, or "torch.matmul"
  Occupancy occupancy{};
#define MARLIN_COST_FIELD(field) double field = 0;
  MARLIN_DISPATCH_COSTS(MARLIN_COST_FIELD)
#undef MARLIN_COST_FIELD
  std::string_view bound{};
};

// The load that one dispatch puts on a GPU. Instructions (see InstructionCounts) and waits are those of one simdgroup
// from start to end.
//   dram_waits        how often a simdgroup that does not load ahead waits for memory
//   cache_waits       how often such a simdgroup waits for a cache, in addition
//   loads_ahead       true if the loads of a step are issued before the products of the previous step
//   weight_bytes      the bytes of the weight, each counted once
//   dram_bytes        as in DispatchCost
#define MARLIN_KERNEL_LOADS(X) \
  X(issue)                     \
  X(complex)                   \
  X(matrix_operations)         \
  X(matrix_clocks)             \
  X(dram_waits)                \
  X(cache_waits)               \
  X(weight_bytes)              \
  X(dram_bytes)                \
  X(l2_bytes)

struct KernelLoad {
  uint64_t threadgroups = 1;
  uint32_t threads = 0;  // per threadgroup
  uint32_t half_registers = 1;
  uint32_t threadgroup_bytes = 0;
  bool loads_ahead = false;
#define MARLIN_LOAD_FIELD(field) double field = 0;
  MARLIN_KERNEL_LOADS(MARLIN_LOAD_FIELD)
#undef MARLIN_LOAD_FIELD
};

// Returns the cost of the load. The caller sets the field `kernel`.
DispatchCost kernel_cost(const KernelLoad& load, const GpuDevice& device);

// Returns true if `bytes` that were read or written once are still in the system-level cache.
bool stays(double bytes, const Chip& chip);

// Returns the cost of reading a tensor `times` times, in bytes read from memory. A byte that is read again from the
// system-level cache counts as half a byte.
double reads(double bytes, double times, const Chip& chip);

// Returns the simdgroups that a core holds on average.
double simdgroups_in_flight(const Occupancy& held, uint64_t threadgroups, const GpuDevice& device);

// Sets the times of memory and L2, the total time and the bound of a cost whose other figures are known.
void finish(DispatchCost& cost, uint64_t threadgroups, double weight_bytes, const GpuDevice& device);

// Returns the time of a kernel that only moves `bytes` from and to memory.
double traffic_seconds(double bytes, const GpuDevice& device);

// The time from the end of one small dispatch to the end of the next, if the next one depends on the first. Three
// sources: llama.cpp discussion 4167 lists times per token. Without the time to read the weights, and divided by the
// 768 dispatches of a token, they give 4 us (M5 Max) to 10 us (M1). pytorch issue 82707 measured 3 us (M1 Max), and
// ds4 pull request 846 measured 10 us (M1 Ultra).
inline constexpr double kDispatchSeconds = 6e-6;

}  // namespace marlin
