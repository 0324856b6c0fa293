// The kernels for a machine that the caller names: tests and benchmarks run every family that this CPU has.
#pragma once

#include "kernels.h"
#include "plan.h"

namespace marlin::cpu {

// What the planner is asked for these arguments.
Problem problem_of(const GemmArguments& arguments, Float32Precision precision);
void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel,
             Float32Precision precision);
void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel);
void gptq_repack_on(Isa isa, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, uint32_t* out,
                    const Parallel& parallel);

}  // namespace marlin::cpu
