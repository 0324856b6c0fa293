// Partial sums of the K slices, added in slice order, then bias and the one rounding.
#include "variants.h"

#include "output.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void reduce(const device uchar* bias [[buffer(kSlotBias)]], device T* out [[buffer(kSlotOut)]],
                       const device float* partials [[buffer(kSlotPartials)]],
                       constant ReduceParams& params [[buffer(kSlotParams)]],
                       uint2 position [[thread_position_in_grid]]) {
  const uint n = position.x;
  const uint m = position.y;
  if (n >= params.N || m >= params.M) return;
  float sum = 0.0f;
  for (uint slice = 0; slice < params.slices; ++slice)
    sum += partials[(ulong(slice) * params.M + m) * params.N + n];
  Output<T>{bias, out, nullptr, params.M, params.N}.store(m, n, sum);
}

MARLIN_KERNELS_REDUCE(MARLIN_INSTANTIATE)
