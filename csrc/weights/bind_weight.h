// Binds the tensors of a packed weight for the kernels of MPS.
#pragma once

#include "csrc/mps/encoder.h"
#include "csrc/planner/problem.h"
#include "csrc/weights/argument_rules.h"

namespace marlin::mps {

// Returns true if the tensor's storage offset is a multiple of `elements`.
bool is_aligned(const Tensor& tensor, int64_t elements);

// Sets the bindings of a weight's tensors.
WeightProblem bind_weight(const char* op, const WeightArguments& weight, const WeightShape& shape, Bindings& bindings);

// Makes a tensor for a decoded weight. If the weight has a perm, the tensor is filled with zeros: a perm with repeated
// or out-of-range indices leaves some rows of the tensor unwritten.
Tensor empty_weight(const WeightProblem& weight, const at::TensorOptions& options);

}  // namespace marlin::mps
