// The GPU that a plan is made for.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/planner/chips.h"

namespace marlin {

struct GpuDevice {
  uint32_t cores = 8;
  bool half_subnormals = false;  // true if the kernel probe_half_subnormals stored 1
  const Chip* chip = &kChips.front();

  auto operator<=>(const GpuDevice&) const = default;
};

// Returns the GPU with this name ("Apple M1 Max") and number of cores. If kChips does not have the name, the most
// similar chip is used: the one with the nearest number of cores or, of several with the same number, the oldest. If
// `family` is not 0, only chips of the newest family in kChips that is not newer than `family` are considered. If
// TORCH_MARLIN_METAL_GPU is set to a name in kChips, that chip is used instead. Throws std::invalid_argument if the
// variable names no chip.
GpuDevice gpu_device(std::string_view name, uint32_t cores, uint32_t family = 0);

}  // namespace marlin
