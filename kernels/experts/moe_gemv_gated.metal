// Multiplies few rows with the gate and up projections of their experts, and applies the gated activation. Each
// threadgroup computes some activated columns of one pair, from the same number of columns of gate and of up. Gate and
// up are rounded before the activation, so its inputs have the same bits as the results of moe_gemv with the same
// number of slices.
#include "kernels/shared/kernel_list.h"

#include "kernels/decoder/gated.h"
#include "kernels/experts/experts.h"
#include "kernels/gemm/gemv.h"

using namespace metal;
using namespace marlin;

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kGemvMaxSimdgroups* kSimdWidth)]] void moe_gemv_gated(
    MARLIN_MOE_BUFFERS, const device uchar* ids [[buffer(kSlotExpertIds)]],
    threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint columns = kGemvColumns / 2;        // activated columns of the threadgroup
  const uint half_N = params.product.N / 2;     // activated columns of a row
  const uint first_column = block.y * columns;  // of the threadgroup
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const bool interleaved = params.gate.interleaved != 0;
  const uint step = interleaved ? 2 : 1;  // distance from one column of gate to the next
  const uint expert = expert_of(ids, block.x, params.id_bytes, params.experts);
  device T* row = out + ulong(block.x) * half_N + first_column;
  if (expert == params.experts) {
    for (uint i = thread_index; i < columns; i += simdgroups * kSimdWidth)
      row[i] = T(0.0f);
    return;
  }

  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  product = product_of_expert<format>(product, expert, params);
  product.a.data = row_of_pair(a, block.x, params);
  // If gate and up are two halves of the weight, half of the lanes multiply columns of gate, and the others columns of
  // up.
  const uint own = lane * kGemvColumnsPerLane;
  const uint n = first_column * step + own + (interleaved || own < columns ? 0 : half_N - columns);
  threadgroup float* slices = load_table<format>(shared, product.lut, thread_index);
  const GemvPlace place{0, block.x, 1};
  gemv_slice<format, T>(product, place, params.product, shared, slices + simdgroup * kGemvColumns, simdgroup, n, lane);

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < columns; i += simdgroups * kSimdWidth) {
    const uint gate = i * step;  // index among the threadgroup's columns
    const uint up = gate + (interleaved ? 1 : columns);
    const uint gate_column = (first_column + i) * step;
    const uint up_column = gate_column + (interleaved ? 1 : half_N);
    const T g = product.output.rounded(gate_column, sum_in_order(slices, gate, simdgroups, kGemvColumns));
    const T u = product.output.rounded(up_column, sum_in_order(slices, up, simdgroups, kGemvColumns));
    row[i] = T(gated(float(g), float(u), params.gate.activation, params.gate.limit, params.gate.alpha));
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_GEMV_GATED(MARLIN_INSTANTIATE))
