// The kernels that compute blocks of 8 to 32 activation rows, with the body of fused.h. They accept any number of rows;
// with fewer than 8 rows, part of a block is padding.
#include "kernels/gemm/fused.h"

#include "kernels/shared/kernel_list.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kFusedMaxSimdgroups* kSimdWidth)]] void gemm_fused(
    MARLIN_PRODUCT_BUFFERS, threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const EvenRows rows{params.M, params.m_begin + block.y * rows_per_threadgroup};
  const Product<T> product = MARLIN_PRODUCT;
  fused_rows<format, T>(product, rows, params, shared, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_GEMM_FUSED(MARLIN_INSTANTIATE))
