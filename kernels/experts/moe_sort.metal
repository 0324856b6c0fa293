// Sorts pairs by expert and divides each expert's rows into blocks. Pairs of one expert keep their order. Pairs whose
// id names no expert are counted for an additional expert after the last one, so that their rows are set to zero.
#include "kernels/shared/variants.h"

#include "kernels/experts/experts.h"

using namespace metal;
using namespace marlin;

namespace marlin {

// The sum of a value over the threads before this one, and its sum over all threads.
struct Scan {
  uint before;
  uint all;
};

MARLIN_INLINE Scan scan(uint value, threadgroup uint* sums, uint lane, uint simdgroup) {
  const uint before = simd_prefix_exclusive_sum(value);
  if (lane == kSimdWidth - 1) sums[simdgroup] = before + value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Scan result{before, 0};
  for (uint i = 0; i < kMoeSortThreads / kSimdWidth; ++i) {
    if (i < simdgroup) result.before += sums[i];
    result.all += sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

}  // namespace marlin

[[kernel, max_total_threads_per_threadgroup(kMoeSortThreads)]] void moe_sort(
    const device uchar* ids [[buffer(kSlotExpertIds)]], device uint* blocks [[buffer(kSlotBlocks)]],
    constant MoeParams& params [[buffer(kSlotParams)]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint sums[kMoeSortThreads / kSimdWidth];
  const uint count = params.product.M;
  device uint* pairs = blocks + params.blocks * kMoeBlockWords;
  uint first_place = 0;
  uint first_block = 0;
  for (uint first = 0; first <= params.experts; first += kMoeSortThreads) {
    const uint expert = first + index;
    uint rows = 0;
    for (uint pair = 0; pair < count; ++pair)
      rows += expert_of(ids, pair, params.id_bytes, params.experts) == expert ? 1 : 0;
    const uint own_blocks = ceil_divide(rows, params.block_rows);
    const Scan places = scan(rows, sums, lane, simdgroup);
    const Scan tables = scan(own_blocks, sums, lane, simdgroup);
    uint place = first_place + places.before;
    for (uint i = 0; i < own_blocks; ++i) {
      device uint* entry = blocks + (first_block + tables.before + i) * kMoeBlockWords;
      entry[0] = expert;
      entry[1] = place + i * params.block_rows;
      entry[2] = min(params.block_rows, rows - i * params.block_rows);
    }
    for (uint pair = 0; rows != 0 && pair < count; ++pair) {
      if (expert_of(ids, pair, params.id_bytes, params.experts) == expert) pairs[place++] = pair;
    }
    first_place += places.all;
    first_block += tables.all;
  }
  for (uint i = first_block + index; i < params.blocks; i += kMoeSortThreads)
    blocks[i * kMoeBlockWords + 2] = 0;
}
