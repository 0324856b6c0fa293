// Converts tensor arguments to the layouts that the kernels read. Makes a view if possible, otherwise a copy.
#pragma once

#include "csrc/core/tensor_checks.h"

namespace marlin {

inline Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

// Reshapes a tensor [..., N] to [M, N]. Copies only if the rows are not evenly spaced. N must not be 0.
inline Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

// Copies the tensor if its elements are not adjacent along the last dimension.
inline Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace marlin
