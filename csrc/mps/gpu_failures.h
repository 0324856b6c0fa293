// Reports a command buffer that the GPU did not complete, for example because a kernel ran for too long. The results of
// such a command buffer are garbage, and torch before 2.15 reports no error.
#pragma once

#include <string>

namespace marlin::mps {

// Records a kernel as part of the current command buffer. Call it inside a block of run_on_queue, before you ask for
// the kernel's encoder. For the first kernel of a command buffer, this function ends the open encoder.
void watch_kernel(const std::string& name);

// Raises an error if a command buffer with kernels of this package has failed on the GPU since the last call. The error
// lists these kernels and Metal's reason.
void raise_gpu_failure();

}  // namespace marlin::mps
