// The kernels for many activation rows on GPUs with tensor units, with the body of tensor.h. They require Metal
// language version 4.0.
#include "kernels/gemm/tensor.h"

#include "kernels/shared/kernel_list.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kTensorMaxSimdgroups* kSimdWidth)]] void gemm_tensor(
    MARLIN_PRODUCT_BUFFERS, uint3 block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ProductRows rows{params.M, params.m_begin + block.y * uint(rows_per_threadgroup)};
  const Product<T> product = MARLIN_PRODUCT;
  tensor_rows<format, T>(product, rows, params, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_GEMM_TENSOR(MARLIN_INSTANTIATE))
