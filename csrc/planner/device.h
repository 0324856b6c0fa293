// The GPU for which a plan is made, and the GPUs and systems that may run the kernels for tensor units.
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

// The properties of a machine that decide whether its tensor units may be used.
struct MetalSystem {
  uint32_t family = 0;  // n of the newest family Apple<n> that Metal reports; 0 if none
  Version macos{};      // as macOS reports it to this process
  Version language{};   // the newest version of the Metal language that this build can compile

  auto operator<=>(const MetalSystem&) const = default;
};

// The oldest system on which tensor units are used. M5 is family Apple10. macOS 26.0 has the functions, bfloat operands
// came with 26.1, and MLX requires 26.2 (mlx/backend/metal/device.cpp).
inline constexpr MetalSystem kTensorSystem{10, {26, 2}, {4, 0}};

// Returns the reason why gemm_tensor cannot run on a machine, or an empty text if it can. The GPU's family matters,
// because macOS 26 compiles the kernel for every chip. On an M4, which has no tensor units, such a kernel ran at half
// the speed of PyTorch's own product (reported by a maintainer of PyTorch).
std::string tensor_refusal(const MetalSystem& system);

// The largest weight, in bytes after the decode, that a product may decode to memory at each call.
struct DecodeLimits {
  uint64_t automatic = 0;          // for variant "auto"
  uint64_t rounded = 256U << 20U;  // for variant "rounded"; the largest weight of FLUX takes 126 MiB in 16 bits

  auto operator<=>(const DecodeLimits&) const = default;
};

struct GpuDevice {
  uint32_t cores = 8;
  bool half_subnormals = false;  // true if fp32 instructions read subnormal halves exactly (kernel
                                 // probe_half_subnormals)
  const Chip* chip = &kChips.front();
  MetalSystem system{};
  bool tensor_units = false;  // true if gemm_tensor may run: tensor_refusal(system) is empty, and no such kernel has
                              // failed
  DecodeLimits decodes{};

  auto operator<=>(const GpuDevice&) const = default;
};

// Returns the GPU with this name ("Apple M1 Max") and number of cores.
// - If TORCH_MARLIN_METAL_GPU is set, its chip replaces `name`. Throws std::invalid_argument if kChips does not list
//   that chip.
// - If kChips does not list `name`, returns the chip with the nearest number of cores, and the oldest on a tie.
// - `family` limits this search to chips of this family. If kChips has no chip of this family, the newest earlier
//   family is searched. 0 means no limit.
GpuDevice gpu_device(std::string_view name, uint32_t cores, uint32_t family = 0);

// Returns the default limits. If TORCH_MARLIN_METAL_DECODE_MB is set, it replaces both limits. Throws
// std::invalid_argument if the variable is not a whole number of MiB.
DecodeLimits decode_limits();

// Sets `device.system` and `device.tensor_units`.
void set_system(GpuDevice& device, const MetalSystem& system);

// Returns a system of this chip's family that is new enough for all kernels that the chip can run.
constexpr MetalSystem supposed_system(const Chip& chip) {
  return {chip.family, kTensorSystem.macos, kTensorSystem.language};
}

// Sets the function that reads this machine's system. The MPS backend calls it when it is loaded.
void set_system_reader(MetalSystem (*reader)());

// Returns this machine's system, or all zeros if no reader is set. Throws what the reader throws.
MetalSystem this_system();

}  // namespace marlin
