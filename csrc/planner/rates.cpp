#include "csrc/planner/rates.h"

#include <algorithm>

#include "kernels/shared/kernel_list.h"

namespace marlin {

namespace {

// Weights of fewer bytes are read at the chip's small_read_share of its rate.
constexpr double kSmallRead = 50e6;

}  // namespace

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family) {
  const double by_threads = family.most_threads.value / threads;
  const double by_registers = family.half_registers.value / (double(half_registers) * threads);
  const double by_memory = threadgroup_bytes == 0 ? by_threads : family.threadgroup_bytes.value / threadgroup_bytes;
  const auto held = static_cast<uint32_t>(std::max(std::min({by_threads, by_registers, by_memory}), 1.0));
  return {held, held * ceil_divide(threads, uint32_t{kSimdWidth})};
}

double memory_seconds(double bytes, double weight_bytes, const GpuDevice& device) {
  const Chip& chip = *device.chip;
  const double share = weight_bytes < kSmallRead ? chip.small_read_share.value : 1;
  return bytes / (dram_bytes_per_second(chip, device.cores) * chip.dram_fraction.value * share);
}

double traffic_seconds(double bytes, const GpuDevice& device) {
  return kDispatchSeconds + memory_seconds(bytes, bytes, device);
}

}  // namespace marlin
