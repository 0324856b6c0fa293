// Multiplies many rows with the weights of their experts. moe_sort has divided each expert's rows into blocks and
// listed the blocks in a table. Each threadgroup computes one block of this table; threadgroups beyond the last block
// return at once. The last block of an expert may have fewer rows. Such a block needs less time of the matrix unit,
// because the kernel has a separate loop for each number of eight-row blocks.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/rows.h"
#include "kernels/gemm/fused.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kFusedMaxSimdgroups* kSimdWidth)]] void moe_fused(
    MARLIN_MOE_BUFFERS, const device uint* blocks [[buffer(kSlotBlocks)]], threadgroup float* shared [[threadgroup(0)]],
    uint3 block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  // The product is made before the branches, because this order saves 4 of 231 half-registers with 32 rows (M1, Mesa's
  // compiler).
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  if (!has_rows(blocks, block.y)) return;
  const ExpertRows rows = rows_of_block(blocks, block.y, params);
  const uint expert = expert_of_block(blocks, block.y);
  if (expert == params.experts) {
    return store_zeros(rows, out, params.product.N, block.x * kFusedColumns, kFusedColumns,
                       simdgroup * kSimdWidth + lane, simdgroups * kSimdWidth);
  }
  product = product_of_expert<format>(product, expert, params);
  const uint most = rows_per_threadgroup;
  if (most >= 4 * kBlock && rows.count > 3 * kBlock) {
    fused_rows<format, T, 4>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else if (most >= 3 * kBlock && rows.count > 2 * kBlock) {
    fused_rows<format, T, 3>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else if (most >= 2 * kBlock && rows.count > kBlock) {
    fused_rows<format, T, 2>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else {
    fused_rows<format, T, 1>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_FUSED(MARLIN_INSTANTIATE))
