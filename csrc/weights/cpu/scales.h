// Loads the scales or zeros of one group and converts them to fp32.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

// Stores the scale of (group, begin + i), without the global scale, in out[i].
void load_group_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin,
                       int64_t count, float* out);
// Stores the global scale of column begin + i, or 1 if there is none, in out[i].
void load_global_scale(const PackedWeight& weight, int64_t begin, int64_t count, float* out);
// Stores the product of the scale of (group, begin + i) and the global scale, rounded to fp32, in out[i].
void load_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                 float* out);
void load_zeros(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                float* out);

}  // namespace marlin::cpu
