// Reads the precision that a program requests from PyTorch.
#pragma once

#include <ATen/Context.h>

#include "csrc/gemm/cpu/plan.h"

namespace marlin::cpu {

// Reads the precision of mkldnn, PyTorch's backend for matrix products on the CPU. This setting can always be read, and
// torch.set_float32_matmul_precision also sets it. at::Context::float32MatmulPrecision() would throw if a program has
// set the precision of a single backend.
inline Precision precision_for(ElementType a_type) {
  if (a_type != ElementType::float32) return Precision::highest;
  const auto asked = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  const bool reduced = asked == at::Float32Precision::TF32 || asked == at::Float32Precision::BF16;
  return reduced ? Precision::reduced : Precision::highest;
}

}  // namespace marlin::cpu
