// The arguments of every product kernel: its buffers by slot, and the structs that access them.
#pragma once

#include "kernels/gemm/activations.h"
#include "kernels/gemm/output.h"
#include "kernels/gemm/weight.h"

#define MARLIN_PRODUCT_TENSORS                                                                                         \
  const device T *a [[buffer(kSlotA)]], const device uint *packed [[buffer(kSlotPacked)]],                             \
      const device uint *high [[buffer(kSlotHigh)]], const device uchar *scales [[buffer(kSlotScales)]],               \
      const device uchar *zeros [[buffer(kSlotZeros)]], const device float *global_scale [[buffer(kSlotGlobalScale)]], \
      const device float *lut [[buffer(kSlotLut)]], const device uchar *super_scales [[buffer(kSlotSuperScales)]],     \
      const device uchar *super_zeros [[buffer(kSlotSuperZeros)]], const device int *perm [[buffer(kSlotPerm)]],       \
      const device uchar *bias [[buffer(kSlotBias)]], device T *out [[buffer(kSlotOut)]],                              \
      device float *partials [[buffer(kSlotPartials)]]

#define MARLIN_PRODUCT_BUFFERS MARLIN_PRODUCT_TENSORS, constant GemmParams& params [[buffer(kSlotParams)]]

// The initializer of a Product from the buffers and from a GemmParams with their sizes and strides.
#define MARLIN_PRODUCT_OF(sizes)                                                                      \
  {{packed, high, scales, zeros, global_scale, super_scales, super_zeros, sizes.N, sizes.group_size}, \
   {a, perm, sizes.a_row_stride, sizes.K},                                                            \
   {bias, out, partials, sizes.M, sizes.N},                                                           \
   lut}

#define MARLIN_PRODUCT MARLIN_PRODUCT_OF(params)

namespace marlin {

template <typename T>
struct Product {
  Weight weight;
  Activations<T> a;
  Output<T> output;
  const device float* lut;
};

// Copies the format's table, if it has one, to the start of threadgroup memory. Returns the address after the table.
template <WeightFormat format>
MARLIN_INLINE threadgroup float* load_table(threadgroup float* memory, const device float* lut, uint thread_index) {
  if (!has_lut(format)) return memory;
  if (thread_index < kLutSize) memory[thread_index] = lut[thread_index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return memory + kLutSize;
}

}  // namespace marlin
