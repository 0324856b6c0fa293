// Runs a plan: checks sizes, binds tensors and parameters, and dispatches the kernels on PyTorch's stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "csrc/mps/library.h"

namespace marlin::mps {

// One tensor for each BufferSlot; undefined if the problem does not have the tensor.
using Bindings = std::array<at::Tensor, kSlotCount>;

// Returns `size` as a 32-bit number for a grid or a kernel's parameters. Raises an error that names `op` and `name` if
// the size is 2^31 or more: positions in a grid are 32-bit, and the last threadgroup may extend past the size.
uint32_t checked_size(const char* op, const char* name, int64_t size);

// Allocates the plan's workspace and encodes its dispatches. Returns without waiting for the GPU. Raises if the GPU
// failed to execute an earlier command buffer of this package.
void encode(const CompiledPlan& compiled, Bindings bindings);

}  // namespace marlin::mps
