// Runs the CPU kernels on PyTorch's own thread pool.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include "csrc/cpu/machine.h"

namespace marlin::cpu {

// at::parallel_for is a header template. This package is compiled without PyTorch's OpenMP flags, so here parallel_for
// would use only one thread. TensorIterator::for_each is compiled into PyTorch and uses all threads. The code below
// calls it for a tensor of `count` bytes: the offset of a byte in the tensor is the index of a task.
inline void torch_parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    if (count > 0) body(0, count);
    return;
  }
  const at::TensorBase bytes = at::detail::empty_cpu({count}, at::kByte);
  const char* first = static_cast<const char*>(bytes.const_data_ptr());
  // The loop is two-dimensional, because PyTorch would wrap a one-dimensional loop, and GCC warns about the wrapper.
  auto loop = [&](char** data, const int64_t* strides, int64_t size, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = data[0] - first + row * strides[1];
      body(begin, begin + size);
    }
  };
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false).add_output(bytes);
  config.build().for_each(loop, grain);
}

inline Parallel at_parallel() {
  return {at::get_num_threads(), torch_parallel_for};
}

}  // namespace marlin::cpu
