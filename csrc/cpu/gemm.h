// gemm() for a machine that the caller names: tests and benchmarks run every family that this CPU has.
#pragma once

#include "kernels.h"
#include "plan.h"

namespace marlin::cpu {

void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel,
             Float32Precision precision);
void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel);

}  // namespace marlin::cpu
