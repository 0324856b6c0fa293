// The GPU that a plan is made for.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/planner/chips.h"

namespace marlin {

struct GpuDevice {
  uint32_t cores = 8;
  bool half_subnormals = false;  // answered by probe_half_subnormals
  const Chip* chip = &kChips.front();

  auto operator<=>(const GpuDevice&) const = default;
};

// The GPU of that name ("Apple M1 Max") and number of cores. One that the table does not know is planned for as the
// oldest chip with the nearest number of cores. TORCH_MARLIN_METAL_GPU, a name of the table, takes the place of both.
// Throws std::invalid_argument where that variable names no chip.
GpuDevice gpu_device(std::string_view name, uint32_t cores);

}  // namespace marlin
