// Reports a command buffer that the GPU did not complete, for example because a kernel ran for too long. The results of
// such a buffer are garbage, and torch before 2.15 reports no error.
#pragma once

#include <string>

namespace marlin::mps {

// Records a kernel as part of the current command buffer. Call it inside a block of run_on_queue, before the kernel
// gets its encoder: for the first kernel of a command buffer, this call ends the open encoder.
void watch_kernel(const std::string& name);

// Raises an error if a command buffer with kernels of this package has failed on the GPU since the last call of this
// function. The error lists these kernels and gives Metal's reason.
void raise_gpu_failure();

}  // namespace marlin::mps
