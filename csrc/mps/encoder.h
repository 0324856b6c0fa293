// Runs a plan: binds tensors and parameters, and dispatches the kernels on PyTorch's stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "csrc/mps/library.h"

namespace marlin::mps {

// Tensors by BufferSlot; undefined if the problem does not have the tensor.
using Bindings = std::array<at::Tensor, kSlotCount>;

// Allocates the plan's workspace and encodes its dispatches. Does not wait for the GPU, like every operator on MPS.
// Raises if the GPU failed to execute an earlier command buffer of this package.
void encode(const CompiledPlan& compiled, Bindings bindings);

}  // namespace marlin::mps
