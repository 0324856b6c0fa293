// Multiplies several rows with the weights of their experts. moe_sort has divided each expert's rows into blocks and
// listed the blocks in a table. Each threadgroup computes one block of this table; threadgroups beyond the last block
// return at once. The kernel has a separate loop for each number of rows, so a block takes no longer than its number of
// rows needs.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/rows.h"
#include "kernels/gemm/gemv.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kGemvMaxSimdgroups* kSimdWidth)]] void moe_gemv_blocks(
    MARLIN_MOE_BUFFERS, const device uint* blocks [[buffer(kSlotBlocks)]], threadgroup float* shared [[threadgroup(0)]],
    uint3 block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  if (!has_rows(blocks, block.x)) return;
  const ExpertRows rows = rows_of_block(blocks, block.x, params);
  const uint expert = expert_of_block(blocks, block.x);
  if (expert == params.experts) {
    return store_zeros(rows, out, params.product.N, block.y * kGemvColumns, kGemvColumns, simdgroup * kSimdWidth + lane,
                       simdgroups * kSimdWidth);
  }
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  product = product_of_expert<format>(product, expert, params);
  const uint most = rows_per_threadgroup;
  if (most >= 4 && rows.count == 4) {
    gemv_rows<format, T, 4>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else if (most >= 3 && rows.count == 3) {
    gemv_rows<format, T, 3>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else if (most >= 2 && rows.count == 2) {
    gemv_rows<format, T, 2>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  } else {
    gemv_rows<format, T, 1>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_GEMV_BLOCKS(MARLIN_INSTANTIATE))
