// The GPU that a plan is made for.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/planner/chips.h"
#include "csrc/planner/tensor_gate.h"

namespace marlin {

struct GpuDevice {
  uint32_t cores = 8;
  bool half_subnormals = false;  // true if the kernel probe_half_subnormals stored 1
  const Chip* chip = &kChips.front();
  MetalSystem system{};
  bool tensor_units = false;  // true if gemm_tensor may run: the gate admits `system`, and nothing failed

  auto operator<=>(const GpuDevice&) const = default;
};

// Returns the GPU with this name ("Apple M1 Max") and number of cores.
// - If TORCH_MARLIN_METAL_GPU is set, its chip is used instead of `name`. Throws std::invalid_argument if kChips does
//   not have that chip.
// - If kChips does not have `name`, the chip with the nearest number of cores is used. On a tie, the oldest is.
// - `family` limits this search to chips of this family or, if kChips has none, of the newest family before it. 0 is no
//   limit.
GpuDevice gpu_device(std::string_view name, uint32_t cores, uint32_t family = 0);

// Sets `system` and `tensor_units`.
void set_system(GpuDevice& device, const MetalSystem& system);

// Returns the oldest system with which all kernels run on this chip.
constexpr MetalSystem supposed_system(const Chip& chip) {
  return {chip.family, kTensorSystem.macos, kTensorSystem.language};
}

// Sets the function that reads this machine's system. The backend for the GPU sets it when it is loaded.
void set_system_reader(MetalSystem (*reader)());

// Returns this machine's system; all zero if no reader was set. Throws what the reader throws.
MetalSystem this_system();

}  // namespace marlin
