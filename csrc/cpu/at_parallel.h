// The threads that the CPU glue gives to the kernels.
#pragma once

#include <ATen/Parallel.h>

#include "kernels.h"

namespace marlin::cpu {

inline Parallel at_parallel() {
  return {at::get_num_threads(), [](int64_t count, int64_t grain, const Body& body) {
            at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(begin, end); });
          }};
}

}  // namespace marlin::cpu
