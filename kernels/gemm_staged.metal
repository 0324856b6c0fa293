// Many activation rows: 64 x 64 output tiles staged through threadgroup memory, see tile.h.
//   single_stage:     fetch | barrier | store | barrier | multiply           half the threadgroup memory
//   double_buffered:  barrier | fetch next | multiply this | store next      one barrier per step
#include "variants.h"

#include "product.h"
#include "tile.h"

using namespace metal;
using namespace marlin;

namespace marlin {

template <WeightFormat format, typename T, uint stages>
MARLIN_INLINE void staged_gemm(const Product<T> product, constant GemmParams& params, threadgroup uchar* shared,
                               uint3 block, uint simdgroup, uint lane) {
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint m0 = block.y * kTileM;
  const uint n0 = block.x * kTileN;
  const uint k_begin = block.z * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);
  const uint stage_bytes = tile_stage_bytes(sizeof(T));
  threadgroup float* table = reinterpret_cast<threadgroup float*>(shared + stages * stage_bytes);
  if (format == WeightFormat::lut4 && thread_index <= kLutSize) {
    table[thread_index] = thread_index < kLutSize ? product.lut[thread_index] : 0.0f;
  }

  TileSums<format, T> sums;
  sums.clear();
  Parcel<format, T> parcel;
  if (stages == 1) {
    const Stage<T> stage = stage_at<T>(shared);
    for (uint k = k_begin; k < k_end; k += kTileK) {
      parcel.fetch(product.weight, product.a, params, m0, n0, k, k_end, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      parcel.store(stage, params, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sums.step(stage, params, table, k, k + kTileK >= k_end, simdgroup, lane);
    }
  } else {
    uint current = 0;
    parcel.fetch(product.weight, product.a, params, m0, n0, k_begin, k_end, thread_index);
    parcel.store(stage_at<T>(shared), params, thread_index);
    for (uint k = k_begin;; k += kTileK) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool is_last = k + kTileK >= k_end;
      if (!is_last) parcel.fetch(product.weight, product.a, params, m0, n0, k + kTileK, k_end, thread_index);
      sums.step(stage_at<T>(shared + current * stage_bytes), params, table, k, is_last, simdgroup, lane);
      if (is_last) break;
      current ^= 1;
      parcel.store(stage_at<T>(shared + current * stage_bytes), params, thread_index);
    }
  }

  const LanePlace place = lane_place(lane);
  const uint m = m0 + TileSums<format, T>::first_row(simdgroup) + place.row;
  const uint n = n0 + TileSums<format, T>::first_column(simdgroup) + place.column;
  MARLIN_UNROLL for (uint i = 0; i < TileSums<format, T>::kBlocksM; ++i) {
    MARLIN_UNROLL for (uint j = 0; j < TileSums<format, T>::kBlocksN; ++j) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const uint row = m + i * kBlock;
        const uint column = n + j * kBlock + e;
        if (row < params.M && column < params.N) {
          product.output.store_slice(block.z, row, column, sums.total[i][j][e]);
        }
      }
    }
  }
}

}  // namespace marlin

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void gemm_double_buffered(
    MARLIN_PRODUCT_BUFFERS, threadgroup uchar* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  staged_gemm<format, T, 2>(MARLIN_PRODUCT, params, shared, block, simdgroup, lane);
}

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void gemm_single_stage(
    MARLIN_PRODUCT_BUFFERS, threadgroup uchar* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  staged_gemm<format, T, 1>(MARLIN_PRODUCT, params, shared, block, simdgroup, lane);
}

MARLIN_KERNELS_GEMM_STAGED(MARLIN_INSTANTIATE)
