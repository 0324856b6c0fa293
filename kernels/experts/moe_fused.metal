// Multiplies many rows with the weights of their experts. moe_sort has divided each expert's rows into blocks and
// listed them in a table. Each threadgroup computes one block of this table. Threadgroups beyond the last block have no
// rows.
#include "kernels/shared/variants.h"

#include "kernels/experts/experts.h"
#include "kernels/gemm/fused.h"

using namespace metal;
using namespace marlin;

namespace marlin {

// The rows of pairs[0] to pairs[count - 1]. A row at or beyond `count` reads the last of these rows instead, and its
// result is not stored.
struct ExpertRows {
  static constexpr uint offsets_per_block() { return 2; }

  const device uint* pairs;
  uint count;
  uint top_k;
  int64_t slot_stride;

  MARLIN_INLINE uint pair(uint row) const thread { return pairs[min(row, count - 1)]; }
  template <typename T>
  MARLIN_INLINE int64_t start(const thread Activations<T>& a, uint row) const thread {
    return int64_t(pair(row) / top_k) * a.row_stride + int64_t(pair(row) % top_k) * slot_stride;
  }

  template <typename T>
  MARLIN_INLINE const device T* row_of_block_0(const thread Activations<T>& a, uint row) const thread {
    return a.data + start(a, row);
  }
  template <typename T>
  MARLIN_INLINE int64_t offset(const thread Activations<T>& a, uint i, uint row) const thread {
    return start(a, i * kBlock + row) - start(a, row);
  }
  MARLIN_INLINE bool stores(uint i, uint row, thread uint& m) const thread {
    m = pair(i * kBlock + row);
    return i * kBlock + row < count;
  }
};

}  // namespace marlin

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kFusedMaxSimdgroups* kSimdWidth)]] void moe_fused(
    MARLIN_MOE_BUFFERS, const device uint* blocks [[buffer(kSlotBlocks)]], threadgroup float* shared [[threadgroup(0)]],
    uint3 block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const device uint* entry = blocks + block.y * kMoeBlockWords;
  const uint count = entry[2];
  if (count == 0) return;
  const device uint* pairs = blocks + params.blocks * kMoeBlockWords + entry[1];
  if (entry[0] == params.experts) {
    if (writes_partials) return;  // moe_reduce ignores these pairs, whose ids name no expert
    for (uint i = simdgroup * kSimdWidth + lane; i < count * kFusedColumns; i += simdgroups * kSimdWidth) {
      const uint column = block.x * kFusedColumns + i % kFusedColumns;
      if (column < params.product.N) out[ulong(pairs[i / kFusedColumns]) * params.product.N + column] = T(0.0f);
    }
    return;
  }
  Product<T> product = MARLIN_PRODUCT_OF(params.product);
  product = product_of_expert<format>(product, entry[0], params);
  const ExpertRows rows{pairs, count, params.top_k, params.a_slot_stride};
  fused_rows<format, T>(product, rows, params.product, shared, block, lane, simdgroup, simdgroups);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_FUSED(MARLIN_INSTANTIATE))
