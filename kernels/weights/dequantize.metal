// Writes the weight as [K, N] in the original order of k. Values are computed in fp32 and rounded once. Each thread
// decodes one packed word.
#include "kernels/shared/kernel_list.h"

#include "kernels/gemm/weight.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel]] void dequantize(
    const device uint* packed [[buffer(kSlotPacked)]], const device uint* high [[buffer(kSlotHigh)]],
    const device uchar* scales [[buffer(kSlotScales)]], const device uchar* zeros [[buffer(kSlotZeros)]],
    const device float* global_scale [[buffer(kSlotGlobalScale)]],
    const device uchar* super_scales [[buffer(kSlotSuperScales)]],
    const device uchar* super_zeros [[buffer(kSlotSuperZeros)]], const device float* lut [[buffer(kSlotLut)]],
    const device int* perm [[buffer(kSlotPerm)]], device T* out [[buffer(kSlotOut)]],
    constant DequantizeParams& params [[buffer(kSlotParams)]], uint2 position [[thread_position_in_grid]]) {
  const uint n = position.x;
  const uint k = position.y * kBlockK;
  if (n >= params.N || k >= params.K) return;
  const Weight weight{packed,      high,     scales,           zeros, global_scale, super_scales,
                      super_zeros, params.N, params.group_size};
  const Vec8<float> values = weight.decoded<format>(lut, k, n);
  for (uint i = 0; i < kBlockK; ++i) {
    const uint row = has_perm ? uint(perm[k + i]) : k + i;
    // The host cannot check the values of perm, so an index outside the weight is skipped.
    if (row < params.K) out[ulong(row) * params.N + n] = T(values.k[i]);
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_DEQUANTIZE(MARLIN_INSTANTIATE))
