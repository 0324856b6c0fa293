// Carries out a plan: binds tensors and parameters, dispatches on PyTorch's stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "csrc/mps/library.h"

namespace marlin::mps {

// Tensors by BufferSlot; undefined where the problem has none.
using Bindings = std::array<at::Tensor, kSlotCount>;

// Asynchronous, as every operator on MPS. The workspace of the plan is allocated here.
void encode(const CompiledPlan& compiled, Bindings bindings);

}  // namespace marlin::mps
