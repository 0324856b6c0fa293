// The gate of gemm_tensor: which GPUs and systems may run the kernel for tensor units.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

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

}  // namespace marlin
