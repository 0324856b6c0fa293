// Tensor arguments in the layouts that the kernels read: views if possible, otherwise copies.
#pragma once

#include "csrc/core/tensor_checks.h"

namespace marlin {

inline Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

// Returns a tensor [..., N] as [M, N]. Copies only if the rows are not evenly spaced. N is not 0.
inline Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

// Returns a tensor whose elements are adjacent along the last dimension.
inline Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace marlin
