// Sorts pairs by expert and divides each expert's rows into blocks. Pairs of one expert keep their order. Pairs whose
// id is not the number of an expert are assigned to an additional expert after the last one, so that their rows become
// zero.
//
// Each simdgroup reads its part of the pairs twice, 32 pairs at a time. First it counts the rows of each expert. Then
// it stores each pair in the next place of its expert. The lanes compare their experts first, so no two lanes write to
// the same address.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/experts.h"

using namespace metal;
using namespace marlin;

namespace marlin {

// The sum of a value over all threads before this one, and over all threads.
struct Scan {
  uint before;
  uint all;
};

MARLIN_INLINE Scan scan(uint value, threadgroup uint* sums, uint lane, uint simdgroup) {
  const uint before = simd_prefix_exclusive_sum(value);
  if (lane == kSimdWidth - 1) sums[simdgroup] = before + value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Scan result{before, 0};
  for (uint i = 0; i < kMoeSortSimdgroups; ++i) {
    if (i < simdgroup) result.before += sums[i];
    result.all += sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

// A lane's pair, compared with the other pairs of its simdgroup.
struct LanePair {
  uint expert;   // counted from the first expert of the pass; kMoeSortThreads if the pass does not sort this pair
  uint earlier;  // number of lower lanes with the same expert
  bool is_last;  // true if no higher lane has the same expert
};

// Returns the lane's pair in a pass that sorts the pairs before `end` and the experts from `first` on.
MARLIN_INLINE LanePair lane_pair(const device uchar* ids, uint pair, uint end, uint first, uint lane,
                                 constant MoeParams& params) {
  const uint expert = pair < end ? expert_of(ids, pair, params.id_bytes, params.experts) - first : kMoeSortThreads;
  LanePair result{min(expert, uint(kMoeSortThreads)), 0, expert < kMoeSortThreads};
  for (uint other = 0; other < kSimdWidth; ++other) {
    const bool is_same = simd_shuffle(result.expert, ushort(other)) == result.expert;
    result.earlier += is_same && other < lane ? 1 : 0;
    result.is_last = result.is_last && !(is_same && other > lane);
  }
  return result;
}

}  // namespace marlin

[[kernel, max_total_threads_per_threadgroup(kMoeSortThreads)]] void moe_sort(
    const device uchar* ids [[buffer(kSlotExpertIds)]], device uint* blocks [[buffer(kSlotBlocks)]],
    constant MoeParams& params [[buffer(kSlotParams)]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  // For each simdgroup and expert: first the number of rows, then the place of the next row.
  threadgroup uint places[kMoeSortSimdgroups][kMoeSortThreads];
  threadgroup uint sums[kMoeSortSimdgroups];
  const uint count = params.product.M;
  device uint* pairs = blocks + params.blocks * kMoeBlockWords;
  const uint part = ceil_divide(count, uint(kMoeSortThreads)) * kSimdWidth;
  const uint begin = simdgroup * part;
  const uint end = min(begin + part, count);
  uint first_place = 0;
  uint first_block = 0;
  for (uint first = 0; first <= params.experts; first += kMoeSortThreads) {
    for (uint i = 0; i < kMoeSortSimdgroups; ++i)
      places[i][index] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint pair = begin; pair < end; pair += kSimdWidth) {
      const LanePair own = lane_pair(ids, pair + lane, end, first, lane, params);
      if (own.is_last) places[simdgroup][own.expert] += own.earlier + 1;
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint rows = 0;
    for (uint i = 0; i < kMoeSortSimdgroups; ++i)
      rows += places[i][index];
    const uint own_blocks = ceil_divide(rows, params.block_rows);
    const Scan row_scan = scan(rows, sums, lane, simdgroup);
    const Scan block_scan = scan(own_blocks, sums, lane, simdgroup);
    uint place = first_place + row_scan.before;
    for (uint i = 0; i < own_blocks; ++i) {
      device uint* entry = blocks + (first_block + block_scan.before + i) * kMoeBlockWords;
      entry[0] = first + index;
      entry[1] = place + i * params.block_rows;
      entry[2] = min(params.block_rows, rows - i * params.block_rows);
    }
    for (uint i = 0; i < kMoeSortSimdgroups; ++i) {
      const uint own = places[i][index];
      places[i][index] = place;
      place += own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint pair = begin; pair < end; pair += kSimdWidth) {
      const LanePair own = lane_pair(ids, pair + lane, end, first, lane, params);
      const bool is_sorted = own.expert < kMoeSortThreads;
      const uint next = is_sorted ? places[simdgroup][own.expert] + own.earlier : 0;
      if (is_sorted) pairs[next] = pair + lane;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (own.is_last) places[simdgroup][own.expert] = next + 1;
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    first_place += row_scan.all;
    first_block += block_scan.all;
  }
  for (uint i = first_block + index; i < params.blocks; i += kMoeSortThreads)
    blocks[i * kMoeBlockWords + 2] = 0;
}
