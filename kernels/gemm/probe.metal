// Tests a property of the GPU that Metal's feature tables do not list. The kernel has its own file, so that it compiles
// fast: the first product of a process waits for the result.
#include "kernels/shared/slots.h"

using namespace metal;
using namespace marlin;

// Stores 1 if an fp32 instruction reads a subnormal half exactly: 2^-24 times 2^24 must be 1.
[[kernel]] void probe_half_subnormals(const device uint* in [[buffer(kSlotPacked)]],
                                      device uint* out [[buffer(kSlotOut)]]) {
  const half2 smallest = as_type<half2>(in[0] & 0x000F000Fu);
  out[0] = fma(float(smallest.x), 16777216.0f, 0.0f) == 1.0f ? 1u : 0u;
}
