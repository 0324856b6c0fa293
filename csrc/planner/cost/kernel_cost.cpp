#include "csrc/planner/cost/kernel_cost.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "csrc/core/math.h"
#include "kernels/shared/kernel_list.h"

namespace marlin {

namespace {

// Memory time and compute time overlap. It is assumed that this fraction of the shorter one is not hidden.
constexpr double kOverlapLoss = 0.05;
// A tensor that fills at most this fraction of the system-level cache is still there when it is read again.
constexpr double kCachedFraction = 0.5;
// The cost of reading a byte from the system-level cache, as a fraction of the cost of reading the byte from memory.
constexpr double kCacheCost = 0.5;
// The bound is "occupancy" if the busiest core takes more than kWaiting times as long as the instructions alone
// would take if they were spread evenly over the cores.
constexpr double kWaiting = 1.25;
// The latency in clocks of a load that the core's cache serves. It is assumed: published figures are 60 to 80.
constexpr double kCacheLatency = 64;
// A weight of fewer bytes is read at a lower rate: the chip's figure small_read_share times the rate of larger weights.
constexpr double kSmallRead = 50e6;

// Returns how long instructions and matrix products take together, from how long each takes alone.
double together(double issue, double matrix, const GpuFamily& family) {
  return issue + matrix - family.matrix_overlap.value * std::min(issue, matrix);
}

std::string_view bound_of(const DispatchCost& cost, const GpuFamily& family) {
  const double longest = std::max({cost.dram_seconds, cost.l2_seconds, cost.compute_seconds});
  if (cost.launch_seconds >= longest) return "launch";
  if (cost.dram_seconds == longest) return "dram";
  if (cost.l2_seconds == longest) return "l2";
  const double alu = together(cost.issue_seconds, cost.matrix_seconds, family);
  if (cost.compute_seconds > kWaiting * std::max(alu, cost.complex_seconds)) return "occupancy";
  if (cost.complex_seconds > alu) return "complex";
  return cost.matrix_seconds > cost.issue_seconds ? "matrix" : "issue";
}

}  // namespace

bool stays(double bytes, const Chip& chip) {
  return bytes <= kCachedFraction * chip.slc_mb.value * 0x1p20;
}

double reads(double bytes, double times, const Chip& chip) {
  return bytes * (1 + (times - 1) * (stays(bytes, chip) ? kCacheCost : 1));
}

double simdgroups_in_flight(const Occupancy& held, uint64_t threadgroups, const GpuDevice& device) {
  const double of_a_threadgroup = double(held.simdgroups) / held.threadgroups;
  return of_a_threadgroup * std::min<double>(held.threadgroups, double(threadgroups) / device.cores);
}

void finish(DispatchCost& cost, uint64_t threadgroups, double weight_bytes, const GpuDevice& device) {
  const Chip& chip = *device.chip;
  const double busy_cores = std::min<double>(device.cores, double(threadgroups));
  cost.l2_seconds =
      cost.l2_bytes / (family_of(chip).l2_bytes_per_clock.value * busy_cores * chip.clock_ghz.value * 1e9);
  const double share = weight_bytes < kSmallRead ? chip.small_read_share.value : 1;
  cost.dram_seconds = cost.dram_bytes / (dram_bytes_per_second(chip, device.cores) * chip.dram_fraction.value * share);
  cost.seconds = cost.launch_seconds + std::max({cost.dram_seconds, cost.l2_seconds, cost.compute_seconds}) +
                 kOverlapLoss * std::min(cost.dram_seconds, cost.compute_seconds);
  cost.bound = bound_of(cost, family_of(chip));
}

DispatchCost kernel_cost(const KernelLoad& load, const GpuDevice& device) {
  const Chip& chip = *device.chip;
  const GpuFamily& family = family_of(chip);
  const uint32_t simdgroups = ceil_divide(load.threads, uint32_t{kSimdWidth});
  const double hertz = chip.clock_ghz.value * 1e9;

  DispatchCost cost;
  cost.occupancy = occupancy(load.threads, load.half_registers, load.threadgroup_bytes, family);
  const uint64_t most = cost.occupancy.threadgroups;
  cost.launch_seconds = kDispatchSeconds;
  cost.waves = double(load.threadgroups) / double(device.cores * most);
  cost.in_flight = simdgroups_in_flight(cost.occupancy, load.threadgroups, device);
  cost.dram_bytes = load.dram_bytes;
  cost.l2_bytes = load.l2_bytes;

  // These figures are clocks of one simdgroup. Below they become the time of all simdgroups on all schedulers.
  const double matrix = load.matrix_operations * load.matrix_clocks;
  const double all = double(load.threadgroups) * simdgroups;
  const double rate = family.schedulers.value * device.cores * hertz;
  cost.matrix_operations = load.matrix_operations * all;
  cost.issue_seconds = load.issue * all / rate;
  cost.complex_seconds = load.complex * all / rate;
  cost.matrix_seconds = matrix * all / rate;

  const double busy = std::max(together(load.issue, matrix, family), load.complex);
  const double latency = family.dram_latency_ns.value * chip.clock_ghz.value;
  const double waits = load.dram_waits * latency + load.cache_waits * kCacheLatency;
  // A simdgroup always waits for its first loads, even if it loads ahead.
  const double alone = load.loads_ahead ? std::max(busy + latency, waits) : busy + latency + waits;
  const auto wave = [&](uint64_t held) {
    return held == 0 ? 0.0 : std::max(double(held * simdgroups) / family.schedulers.value * busy, alone);
  };
  const uint64_t on_a_core = ceil_divide(load.threadgroups, uint64_t{device.cores});
  cost.compute_seconds = (double(on_a_core / most) * wave(most) + wave(on_a_core % most)) / hertz;
  finish(cost, load.threadgroups, load.weight_bytes, device);
  return cost;
}

double traffic_seconds(double bytes, const GpuDevice& device) {
  DispatchCost cost{.dram_bytes = bytes, .l2_bytes = bytes, .launch_seconds = kDispatchSeconds};
  finish(cost, device.cores, bytes, device);
  return cost.seconds;
}

uint32_t largest_threadgroup(uint32_t half_registers) {
  // Mesa's table for the M1. Each row has a number of half-registers per thread, and the most threads that a
  // threadgroup can have with at most this number.
  constexpr std::array<std::array<uint32_t, 2>, 10> rows{{{104, 1024},
                                                          {112, 896},
                                                          {128, 832},
                                                          {136, 768},
                                                          {144, 704},
                                                          {160, 640},
                                                          {184, 576},
                                                          {208, 512},
                                                          {232, 448},
                                                          {256, 384}}};
  const auto row = std::ranges::find_if(rows, [&](const auto& entry) { return half_registers <= entry[0]; });
  return row == rows.end() ? 0 : (*row)[1];
}

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family) {
  const double by_threads = family.most_threads.value / threads;
  const double by_registers = family.half_registers.value / (double(half_registers) * threads);
  const double by_memory = threadgroup_bytes == 0 ? by_threads : family.threadgroup_bytes.value / threadgroup_bytes;
  const double least = std::min({by_threads, by_registers, by_memory});
  const auto held = static_cast<uint32_t>(std::max(least, 1.0));
  return {.threadgroups = held,
          .simdgroups = held * ceil_divide(threads, kSimdWidth),
          .limit = least == by_threads     ? "threads"
                   : least == by_registers ? "registers"
                                           : "threadgroup memory"};
}

}  // namespace marlin
