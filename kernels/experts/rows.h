// The blocks of rows that moe_sort makes: the addresses of their activations and of their results.
#pragma once

#include "kernels/experts/experts.h"
#include "kernels/gemm/fragment.h"

namespace marlin {

// The rows of pairs[0] to pairs[count - 1], which all have the same expert. For a row at or beyond `count`, the
// functions read the last of these rows instead, and its result is not stored.
struct ExpertRows {
  const device uint* pairs;
  uint count;
  uint top_k;
  int64_t slot_stride;

  MARLIN_INLINE uint pair(uint row) const thread { return pairs[min(row, count - 1)]; }

  // The members that tensor.h uses.
  MARLIN_INLINE bool has(uint row) const thread { return row < count; }
  template <typename T>
  MARLIN_INLINE const device T* start(const thread Activations<T>& a, uint row) const thread {
    return a.data + int64_t(pair(row) / top_k) * a.row_stride + int64_t(pair(row) % top_k) * slot_stride;
  }
  MARLIN_INLINE bool stores(uint row, thread uint& m) const thread {
    m = pair(row);
    return row < count;
  }

  // The members that fused.h uses. All rows are offsets from one pointer, because the GPU adds an unsigned 32-bit
  // offset to a pointer within the load. The planner uses moe_fused only if all offsets of the activations fit in 32
  // bits.
  typedef uint Offset;
  static constexpr uint pointers() { return 1; }
  static constexpr uint offsets_per_block() { return 2; }
  template <typename T>
  MARLIN_INLINE const device T* pointer(const thread Activations<T>& a, uint) const thread {
    return a.data;
  }
  template <typename T>
  MARLIN_INLINE Offset offset(const thread Activations<T>& a, uint i, uint row) const thread {
    const uint own = pair(i * kBlock + row);
    return own / top_k * uint(a.row_stride) + own % top_k * uint(slot_stride);
  }
  MARLIN_INLINE bool stores(uint i, uint row, thread uint& m) const thread { return stores(i * kBlock + row, m); }
};

// Returns true if block `index` of moe_sort's table has rows. The other words of an unused block are undefined.
MARLIN_INLINE bool has_rows(const device uint* blocks, uint index) {
  return blocks[index * kMoeBlockWords + 2] != 0;
}

MARLIN_INLINE ExpertRows rows_of_block(const device uint* blocks, uint index, constant MoeParams& params) {
  const device uint* entry = blocks + index * kMoeBlockWords;
  return {blocks + params.blocks * kMoeBlockWords + entry[1], entry[2], params.top_k, params.a_slot_stride};
}

// Returns the block's expert, or `experts` if the ids of the block's pairs are not numbers of experts.
MARLIN_INLINE uint expert_of_block(const device uint* blocks, uint index) {
  return blocks[index * kMoeBlockWords];
}

// Stores zeros for rows whose ids are not numbers of experts, in `columns` columns from `first_column` on. Does nothing
// if moe_reduce combines the products, because moe_reduce ignores these pairs.
template <typename T>
MARLIN_INLINE void store_zeros(const thread ExpertRows& rows, device T* out, uint N, uint first_column, uint columns,
                               uint thread_index, uint threads) {
  if (writes_partials) return;
  for (uint i = thread_index; i < rows.count * columns; i += threads) {
    const uint column = first_column + i % columns;
    if (column < N) out[ulong(rows.pairs[i / columns]) * N + column] = T(0.0f);
  }
}

}  // namespace marlin
