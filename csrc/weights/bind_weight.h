// Binds the tensors of a packed weight to the buffer slots of Metal kernels.
#pragma once

#include "csrc/mps/encoder.h"
#include "csrc/planner/problem.h"
#include "csrc/weights/argument_rules.h"

namespace marlin::mps {

// Returns true if the tensor's storage offset is a multiple of `elements`.
bool is_aligned(const Tensor& tensor, int64_t elements);

// Stores a weight's tensors in `bindings`.
WeightProblem bind_weight(const char* op, const WeightArguments& weight, const WeightShape& shape, Bindings& bindings);

// Allocates a tensor for a decoded weight. If the weight has a perm, the tensor is filled with zeros, because a perm
// with repeated or out-of-range indices leaves some rows unwritten.
Tensor empty_weight(const WeightProblem& weight, const at::TensorOptions& options);

}  // namespace marlin::mps
