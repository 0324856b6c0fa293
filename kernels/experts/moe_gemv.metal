// Multiplies few rows with the weights of their experts. Each threadgroup reads the expert id of one pair and
// multiplies the pair's row with the weight of that expert.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/experts.h"
#include "kernels/gemm/gemv.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kGemvMaxSimdgroups* kSimdWidth)]] void moe_gemv(
    MARLIN_MOE_BUFFERS, const device uchar* ids [[buffer(kSlotExpertIds)]],
    threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  const uint pair = block.x;
  const uint expert = expert_of(ids, pair, params.id_bytes, params.experts);
  if (expert == params.experts) {
    if (writes_partials) return;  // moe_reduce ignores this pair, because its id is not the number of an expert
    for (uint i = simdgroup * kSimdWidth + lane; i < kGemvColumns; i += simdgroups * kSimdWidth) {
      const uint column = block.y * kGemvColumns + i;
      if (column < params.product.N) out[ulong(pair) * params.product.N + column] = T(0.0f);
    }
    return;
  }
  product = product_of_expert<format>(product, expert, params);
  product.a.data = row_of_pair(a, pair, params);
  const GemvPlace place{0, pair, 1};
  gemv_rows<format, T>(product, place, params.product, shared, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_GEMV(MARLIN_INSTANTIATE))
