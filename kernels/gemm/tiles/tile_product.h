// Computes output tiles for many activation rows. The operands are staged in threadgroup memory (tile.h). The order
// within a step:
//   single_stage:     fetch | barrier | store | barrier | multiply           (needs half the threadgroup memory)
//   double_buffered:  barrier | fetch next | multiply this | store next      (needs only one barrier per step)
//   double_buffered, tiles larger than 64 x 64:  barrier | fetch next | store next | multiply this
// fetch loads into registers, because Metal has no public copy in the background like CUDA's cp.async.
#pragma once

#include "kernels/shared/kernel_list.h"

#include "kernels/gemm/product.h"
#include "kernels/gemm/tiles/tile.h"

namespace marlin {

// Computes an output tile, summed over k_begin to k_end, and stores it.
template <WeightFormat format, typename T, typename Tile, uint stages>
struct TileProduct {
  typedef TileAccumulators<format, T, Tile> Sums;

  threadgroup uchar* shared;
  uint simdgroup;
  uint lane;
  Sums sums;

  static MARLIN_INLINE uint stage_bytes() { return tile_stage_bytes({Tile::kM, Tile::kN, Tile::kK}, sizeof(T)); }
  MARLIN_INLINE uint thread_index() const thread { return simdgroup * kSimdWidth + lane; }
  MARLIN_INLINE threadgroup float* table() const thread {
    return reinterpret_cast<threadgroup float*>(shared + stages * stage_bytes());
  }
  MARLIN_INLINE Stage<T, Tile> stage(uint index) const thread {
    return stage_at<T, Tile>(shared + index * stage_bytes());
  }

  // Copies the format's table, if it has one, to threadgroup memory. The first barrier of compute() makes it visible.
  MARLIN_INLINE void load_table(thread const Product<T>& product) const thread {
    if (has_lut(format) && thread_index() <= kLutSize) {
      table()[thread_index()] = thread_index() < kLutSize ? product.lut[thread_index()] : 0.0f;
    }
  }

  MARLIN_INLINE void compute(thread const Product<T>& product, constant GemmParams& params, uint m0, uint n0,
                             uint k_begin, uint k_end) thread {
    sums.begin(params, k_begin, k_end);
    TileLoader<format, T, Tile> loader;
    loader.begin();
    if (stages == 1) {
      for (uint k = k_begin; k < k_end; k += Tile::kK) {
        loader.fetch(product.weight, product.a, params, m0, n0, k, k_end, thread_index());
        threadgroup_barrier(mem_flags::mem_threadgroup);
        loader.store(stage(0), params, thread_index());
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums.step(stage(0), params, table(), k, k_end, simdgroup, lane);
      }
    } else {
      uint current = 0;
      loader.fetch(product.weight, product.a, params, m0, n0, k_begin, k_end, thread_index());
      loader.store(stage(0), params, thread_index());
      for (uint k = k_begin;; k += Tile::kK) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool is_last = k + Tile::kK >= k_end;
        if (!is_last) {
          loader.fetch(product.weight, product.a, params, m0, n0, k + Tile::kK, k_end, thread_index());
          if (Tile::kStoresEarly) loader.store(stage(current ^ 1), params, thread_index());
        }
        sums.step(stage(current), params, table(), k, k_end, simdgroup, lane);
        if (is_last) break;
        current ^= 1;
        if (!Tile::kStoresEarly) loader.store(stage(current), params, thread_index());
      }
    }
  }

  // Calls target.store(row, column, sum) for each of the lane's sums that lies inside the M x N output.
  template <typename Target>
  MARLIN_INLINE void store(thread const Target& target, constant GemmParams& params, uint m0, uint n0) const thread {
    const LanePlace place = lane_place(lane);
    const uint m = Sums::first_row(simdgroup) + place.row;
    const uint n = Sums::first_column(simdgroup) + place.column;
    MARLIN_UNROLL for (uint i = 0; i < Tile::kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < Tile::kBlocksN; ++j) {
        MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
          const uint row = m + i * kBlock;
          const uint column = n + j * kBlock + e;
          if (m0 + row < params.M && n0 + column < params.N) target.store(row, column, sums.total[i][j][e]);
        }
      }
    }
  }
};

}  // namespace marlin
