// Looks up rows of an embedding table. The packed weight is [K/8, rows of the table]: each of its columns is one row of
// the table. Each thread decodes one packed word.
#include "kernels/shared/kernel_list.h"

#include "kernels/gemm/weight.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel]] void embedding(const device uchar* ids [[buffer(kSlotA)]], const device uint* packed [[buffer(kSlotPacked)]],
                          const device uint* high [[buffer(kSlotHigh)]],
                          const device uchar* scales [[buffer(kSlotScales)]],
                          const device uchar* zeros [[buffer(kSlotZeros)]],
                          const device float* global_scale [[buffer(kSlotGlobalScale)]],
                          const device uchar* super_scales [[buffer(kSlotSuperScales)]],
                          const device uchar* super_zeros [[buffer(kSlotSuperZeros)]],
                          const device float* lut [[buffer(kSlotLut)]], const device int* perm [[buffer(kSlotPerm)]],
                          device T* out [[buffer(kSlotOut)]], constant EmbeddingParams& params [[buffer(kSlotParams)]],
                          uint2 position [[thread_position_in_grid]]) {
  const uint k = position.x * kBlockK;
  const uint row = position.y;
  if (row >= params.count || k >= params.K) return;
  const long id = params.id_bytes == 8 ? reinterpret_cast<const device long*>(ids)[row]
                                       : long(reinterpret_cast<const device int*>(ids)[row]);
  // The host cannot check the values of ids. A wrong id gives a row of NaN, so that the mistake is visible.
  const bool known = id >= 0 && id < long(params.N);
  const Weight weight{packed,      high,     scales,           zeros, global_scale, super_scales,
                      super_zeros, params.N, params.group_size};
  const Vec8<float> values = weight.decoded<format>(lut, k, known ? uint(id) : 0);
  device T* const values_of_row = out + ulong(row) * params.K;
  for (uint i = 0; i < kBlockK; ++i) {
    const uint place = has_perm ? uint(perm[k + i]) : k + i;
    // The host cannot check the values of perm, so an index outside the row is skipped.
    if (place < params.K) values_of_row[place] = known ? T(values.k[i]) : T(NAN);
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_EMBEDDING(MARLIN_INSTANTIATE))
