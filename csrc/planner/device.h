// The GPU that a plan is made for, and which GPUs and systems may run the kernels for tensor units.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/planner/chips.h"

namespace marlin {

struct Version {
  uint32_t major = 0;
  uint32_t minor = 0;

  auto operator<=>(const Version&) const = default;
};

// What the gate needs to know of a machine.
struct MetalSystem {
  uint32_t family = 0;  // n of the newest family Apple<n> that Metal reports; 0 if none
  Version macos{};      // as macOS reports it to this process
  Version language{};   // the newest version of Metal's language for which this build can compile

  auto operator<=>(const MetalSystem&) const = default;
};

// The oldest system whose tensor units are used. M5 is family Apple10. MLX's kernels have the same limit of macOS
// (mlx/backend/metal/device.cpp). macOS 26.0 has the functions, but bfloat operands came with 26.1.
inline constexpr MetalSystem kTensorSystem{10, {26, 2}, {4, 0}};

// Returns the reason why gemm_tensor does not run on a machine, or an empty text if it does. The language version alone
// is not enough: macOS 26 compiles the kernel for every chip. On an M4, which has no tensor units, such a kernel ran at
// half the speed of PyTorch's own product (comment on a pull request of PyTorch). So the GPU's family is checked, too.
std::string tensor_refusal(const MetalSystem& system);

// The largest weight that a product may decode at each call, in bytes of the activations' type.
struct DecodeLimits {
  uint64_t automatic = 0;          // by "auto"
  uint64_t rounded = 256U << 20U;  // by "rounded"; the largest weight of FLUX takes 126 MiB in 16 bits

  auto operator<=>(const DecodeLimits&) const = default;
};

struct GpuDevice {
  uint32_t cores = 8;
  bool half_subnormals = false;  // true if the kernel probe_half_subnormals stored 1
  const Chip* chip = &kChips.front();
  MetalSystem system{};
  bool tensor_units = false;  // true if gemm_tensor may run: the gate admits `system`, and nothing failed
  DecodeLimits decodes{};

  auto operator<=>(const GpuDevice&) const = default;
};

// Returns the GPU with this name ("Apple M1 Max") and number of cores.
// - If TORCH_MARLIN_METAL_GPU is set, its chip is used instead of `name`. Throws std::invalid_argument if kChips does
//   not have that chip.
// - If kChips does not have `name`, the chip with the nearest number of cores is used. On a tie, the oldest is.
// - `family` limits this search to chips of this family or, if kChips has none, of the newest family before it. 0 is no
//   limit.
GpuDevice gpu_device(std::string_view name, uint32_t cores, uint32_t family = 0);

// Returns the limits; TORCH_MARLIN_METAL_DECODE_MB, if it is set, is both. Throws std::invalid_argument if it is no
// whole number of MiB.
DecodeLimits decode_limits();

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
