// Loads the scales and zeros of one group and converts them to fp32.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

// out[i] = scale of (group, begin + i), without the global scale.
void load_group_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin,
                       int64_t count, float* out);
// out[i] = global scale of column begin + i; 1 if there is none.
void load_global_scale(const PackedWeight& weight, int64_t begin, int64_t count, float* out);
// Writes the scale of (group, begin + i), times the global scale and rounded to fp32, to out[i].
void load_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                 float* out);
void load_zeros(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                float* out);

}  // namespace marlin::cpu
