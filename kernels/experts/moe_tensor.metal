// moe_fused for GPUs with tensor units, with the body of tensor.h. Requires Metal language version 4.0.
#include "kernels/gemm/tensor.h"

#include "kernels/experts/rows.h"
#include "kernels/shared/kernel_list.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kTensorMaxSimdgroups* kSimdWidth)]] void moe_tensor(
    MARLIN_MOE_BUFFERS, const device uint* blocks [[buffer(kSlotBlocks)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  if (!has_rows(blocks, block.y)) return;
  const ExpertRows rows = rows_of_block(blocks, block.y, params);
  const uint expert = expert_of_block(blocks, block.y);
  if (expert == params.experts) {
    const uint columns = simdgroups * kTensorRows / uint(rows_per_threadgroup) * kTensorColumns;
    return store_zeros(rows, out, params.product.N, block.x * columns, columns, simdgroup * kSimdWidth + lane,
                       simdgroups * kSimdWidth);
  }
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  product = product_of_expert<format>(product, expert, params);
  tensor_rows<format, T>(product, rows, params.product, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_TENSOR(MARLIN_INSTANTIATE))
