// Computes one output tile per threadgroup, for many activation rows: gemm_double_buffered_* and gemm_single_stage_*.
// The third dimension of the grid splits K.
#include "kernels/gemm/tiles/tile_product.h"

using namespace metal;
using namespace marlin;

namespace marlin {

// Stores a tile in the output, or in one split of the partial sums.
template <typename T>
struct SplitOfTile {
  Output<T> output;
  uint split;
  uint m0;
  uint n0;

  MARLIN_INLINE void store(uint row, uint column, float sum) const thread {
    output.store_split(split, m0 + row, n0 + column, sum);
  }
};

template <WeightFormat format, typename T, typename Tile, uint stages>
MARLIN_INLINE void staged_gemm(const Product<T> product, constant GemmParams& params, threadgroup uchar* shared,
                               uint3 block, uint simdgroup, uint lane) {
  const uint m0 = block.y * Tile::kM;
  const uint n0 = block.x * Tile::kN;
  const uint k_begin = block.z * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);
  TileProduct<format, T, Tile, stages> tile{shared, simdgroup, lane};
  tile.load_table(product);
  tile.compute(product, params, m0, n0, k_begin, k_end);
  tile.store(SplitOfTile<T>{product.output, block.z, m0, n0}, params, m0, n0);
}

}  // namespace marlin

#define MARLIN_STAGED_KERNEL(name, stages, M, N, K)                                                        \
  template <WeightFormat format, typename T>                                                               \
  [[kernel, max_total_threads_per_threadgroup(Tile<M, N, K>::kThreads)]] void name(                        \
      MARLIN_PRODUCT_BUFFERS, threadgroup uchar* shared [[threadgroup(0)]],                                \
      uint3 block [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],     \
      uint lane [[thread_index_in_simdgroup]]) {                                                           \
    staged_gemm<format, T, Tile<M, N, K>, stages>(MARLIN_PRODUCT, params, shared, block, simdgroup, lane); \
  }
#define MARLIN_STAGED_KERNELS(M, N, K, ...)                              \
  MARLIN_STAGED_KERNEL(gemm_double_buffered_##M##x##N##x##K, 2, M, N, K) \
  MARLIN_STAGED_KERNEL(gemm_single_stage_##M##x##N##x##K, 1, M, N, K)

MARLIN_TILES(MARLIN_STAGED_KERNELS)
MARLIN_FUNCTIONS(MARLIN_KERNELS_GEMM_STAGED(MARLIN_INSTANTIATE))
