// What a chip's rates say of any kernel: how many of its threadgroups a core holds, and the time of its bytes.
#pragma once

#include <cstdint>

#include "csrc/planner/device.h"

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

// Returns the time to move bytes from and to memory if most of them belong to a weight of `weight_bytes`.
double memory_seconds(double bytes, double weight_bytes, const GpuDevice& device);

// Returns the time of a kernel that only moves `bytes` from and to memory.
double traffic_seconds(double bytes, const GpuDevice& device);

}  // namespace marlin
