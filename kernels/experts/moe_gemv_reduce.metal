// Multiplies few rows with the weights of their experts and adds up the results of each token, in one dispatch. Each
// threadgroup computes some columns of one token. The simdgroups of a slot read the id of its expert and split K
// between them. The result has the same bits as moe_gemv with the same number of slices, followed by moe_reduce.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/experts.h"
#include "kernels/gemm/gemv.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kMoeReduceMaxSimdgroups* kSimdWidth)]] void moe_gemv_reduce(
    MARLIN_MOE_BUFFERS, const device uchar* ids [[buffer(kSlotExpertIds)]],
    const device uchar* row_weights [[buffer(kSlotRowWeights)]], threadgroup float* shared [[threadgroup(0)]],
    uint3 block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  const uint N = params.product.N;
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint slices = simdgroups / params.top_k;
  const uint slice = simdgroup % slices;
  const uint pair = block.x * params.top_k + simdgroup / slices;
  const uint expert = expert_of(ids, pair, params.id_bytes, params.experts);
  const uint n = block.y * kGemvColumns + lane * kGemvColumnsPerLane;

  threadgroup float* sums = load_table<format>(shared, product.lut, thread_index);
  threadgroup float* own = sums + simdgroup * kGemvColumns;
  threadgroup float4* columns = reinterpret_cast<threadgroup float4*>(own) + lane;
  if (expert != params.experts) {
    Product<T> moved = product_of_expert<format>(product, expert, params);
    moved.a.data = row_of_pair(a, pair, params);
    const GemvPlace place{0, pair, 1};
    gemv_slice<format, T>(moved, place, params.product, shared, own, slice, n, lane);
  } else {
    *columns = float4(0.0f);
  }

  // The loads below are before the barrier, so all slots wait for them at the same time.
  const bool ends_slot = slice == 0 && expert != params.experts;
  float4 biases = float4(0.0f);
  float weight = 1.0f;
  if (ends_slot) {
    weight = weight_of(row_weights, pair, params.row_weights_type);
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      if (n + c < N) biases[c] = bias_of(bias, expert, n + c, N);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (ends_slot) {
    float4 sum = sum_in_order(columns, 0, slices, kSimdWidth);
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) sum[c] = term_of(sum[c], biases[c], weight);
    *columns = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < kGemvColumns; i += simdgroups * kSimdWidth) {
    const uint column = block.y * kGemvColumns + i;
    if (column >= N) continue;
    out[ulong(block.x) * N + column] = T(sum_in_order(sums, i, params.top_k, slices * kGemvColumns));
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_GEMV_REDUCE(MARLIN_INSTANTIATE))
