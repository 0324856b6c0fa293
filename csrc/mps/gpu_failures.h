// Reports a command buffer that the GPU did not complete, for example because a kernel ran for too long. Its results
// are garbage, and torch before 2.15 says nothing.
#pragma once

#include <string>

namespace marlin::mps {

// Inside a block of run_on_queue, before a kernel gets its encoder: remembers the kernel as a part of the current
// command buffer. The first kernel of a command buffer ends the open encoder.
void watch_kernel(const std::string& name);

// Raises if the GPU has given up a command buffer with kernels of this package since the last call, and names the
// kernels and Metal's reason.
void raise_gpu_failure();

}  // namespace marlin::mps
