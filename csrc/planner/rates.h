// Estimates from a chip's rates that hold for any kernel: how many of its threadgroups a core holds, and the time to
// move its bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/planner/device.h"
#include "kernels/shared/kernel_list.h"

namespace marlin {

// The time from the end of one small dispatch to the end of a second one that depends on it. Published figures are 3 to
// 10 us (lab/notes/tile-sizing.md).
inline constexpr double kDispatchSeconds = 6e-6;
// Weights of fewer bytes than this are read at only small_read_share of the chip's rate.
inline constexpr double kSmallRead = 50e6;

// The numbers of threadgroups and simdgroups of a kernel that a core holds at once.
struct Occupancy {
  uint32_t threadgroups;
  uint32_t simdgroups;
};

inline Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes,
                           const GpuFamily& family) {
  const double by_threads = family.most_threads.value / threads;
  const double by_registers = family.half_registers.value / (double(half_registers) * threads);
  const double by_memory = threadgroup_bytes == 0 ? by_threads : family.threadgroup_bytes.value / threadgroup_bytes;
  const auto held = static_cast<uint32_t>(std::max(std::min({by_threads, by_registers, by_memory}), 1.0));
  return {held, held * ceil_divide(threads, uint32_t{kSimdWidth})};
}

// Returns the time to move `bytes` between memory and the GPU if most of them belong to a weight of `weight_bytes`.
inline double memory_seconds(double bytes, double weight_bytes, const GpuDevice& device) {
  const Chip& chip = *device.chip;
  const double share = weight_bytes < kSmallRead ? chip.small_read_share.value : 1;
  return bytes / (dram_bytes_per_second(chip, device.cores) * chip.dram_fraction.value * share);
}

// Returns the time of a kernel that only moves `bytes` between memory and the GPU.
inline double traffic_seconds(double bytes, const GpuDevice& device) {
  return kDispatchSeconds + memory_seconds(bytes, bytes, device);
}

}  // namespace marlin
