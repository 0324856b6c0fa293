// What the operators that multiply with packed weights share: how they check sizes, bind a weight, and find a plan.
#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <string_view>

#include "csrc/mps/encoder.h"
#include "csrc/ops/argument_rules.h"
#include "csrc/planner/device.h"

namespace marlin::mps {

// Checks that a size fits in a Metal grid. Positions are 32-bit, and the last threadgroup may extend past the size.
uint32_t grid_size(const char* op, const char* name, int64_t size);

// Returns true if the tensor starts at a multiple of so many elements in its storage.
bool is_aligned(const Tensor& tensor, int64_t elements);

// Returns the tensor, contiguous, or an undefined tensor.
Tensor held(const OptionalTensor& tensor);

// Sets the bindings of a weight's tensors.
WeightProblem bind_weight(const char* op, const WeightTensors& weight, const WeightShape& shape, Bindings& bindings);

// Returns true if this GPU keeps subnormal halves when it widens them to fp32, which the fastest integer decode needs.
// The first call runs the probe kernel.
bool half_subnormals(const Tensor& like);

GpuDevice this_gpu(const Tensor& like);
GpuDevice without_tensor_units(GpuDevice device);

// Returns find(true). If a kernel for tensor units fails on this Mac, a warning names the reason once, and from then on
// "auto" gets find(false), the plan for a GPU without these units. A product that asks for such a kernel by name gets
// the error.
std::shared_ptr<const CompiledPlan> with_or_without_tensor_units(
    std::string_view variant, c10::function_ref<std::shared_ptr<const CompiledPlan>(bool)> find);

// A product that would keep the GPU from other work for too long is computed in parts, each with some of the rows.
// Returns the number of rows of the first part, which is M if the product need not be divided.
int64_t first_part(const Plan& plan, int64_t M);

}  // namespace marlin::mps
