// The kernels for up to kGemvMaxRows activation rows, with the body of gemv.h.
#include "kernels/gemm/gemv.h"

#include "kernels/shared/kernel_list.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kGemvMaxSimdgroups* kSimdWidth)]] void gemv(
    MARLIN_PRODUCT_BUFFERS, threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint m = block.x * rows_per_threadgroup;
  const Product<T> product = MARLIN_PRODUCT;
  const GemvPlace place{m, m, params.M - m};
  gemv_rows<format, T>(product, place, params, shared, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_GEMV(MARLIN_INSTANTIATE))
