// Computes the tiles of the staged kernels with a fixed number of threadgroups. Each threadgroup computes one stripe: a
// contiguous part of the sequence of all (tile, slice of K) units. The numbers of units of two threadgroups differ by
// at most one. docs/inside/kernels.md has a drawing.
#include "kernels/gemm/tiles/tile_product.h"

using namespace metal;
using namespace marlin;

namespace marlin {

template <typename T>
struct WholeTile {
  Output<T> output;
  uint m0;
  uint n0;

  MARLIN_INLINE void store(uint row, uint column, float sum) const thread { output.store(m0 + row, n0 + column, sum); }
};

// Stores one stripe's partial sums of a tile that several stripes share.
struct SharedTile {
  device float* partials;  // [tile M, tile N]
  uint columns;

  MARLIN_INLINE void store(uint row, uint column, float sum) const thread { partials[row * columns + column] = sum; }
};

template <WeightFormat format, typename T, typename Tile>
MARLIN_INLINE void striped_gemm(const Product<T> product, constant GemmParams& params, threadgroup uchar* shared,
                                uint stripe, uint stripes, uint simdgroup, uint lane) {
  const uint tiles_m = ceil_divide(params.M, Tile::kM);
  const uint slices = stripe_slices(params.K, params.k_per_slice);
  const uint units = tiles_m * ceil_divide(params.N, Tile::kN) * slices;
  const uint begin = stripe_begin(units, stripes, stripe);
  const uint end = stripe_begin(units, stripes, stripe + 1);

  TileProduct<format, T, Tile, 2> tile{shared, simdgroup, lane};
  tile.load_table(product);
  for (uint unit = begin; unit < end;) {
    const uint index = unit / slices;
    const uint tile_begin = index * slices;
    const uint tile_end = tile_begin + slices;
    const uint unit_end = min(end, tile_end);
    const uint m0 = index % tiles_m * Tile::kM;
    const uint n0 = index / tiles_m * Tile::kN;
    const uint k_begin = (unit - tile_begin) * params.k_per_slice;
    const uint k_end = unit_end == tile_end ? params.K : (unit_end - tile_begin) * params.k_per_slice;
    // Other simdgroups may still read the previous tile's data from the stage that this tile fills first.
    if (unit != begin) threadgroup_barrier(mem_flags::mem_threadgroup);
    tile.compute(product, params, m0, n0, k_begin, k_end);
    if (!writes_partials || (unit == tile_begin && unit_end == tile_end)) {
      tile.store(WholeTile<T>{product.output, m0, n0}, params, m0, n0);
    } else {
      const uint slot = 2 * stripe + (unit == begin ? 0 : 1);
      tile.store(SharedTile{product.output.partials + ulong(slot) * (Tile::kM * Tile::kN), Tile::kN}, params, m0, n0);
    }
    unit = unit_end;
  }
}

}  // namespace marlin

#define MARLIN_STRIPED_KERNEL(M, N, K, ...)                                                                   \
  template <WeightFormat format, typename T>                                                                  \
  [[kernel, max_total_threads_per_threadgroup(Tile<M, N, K>::kThreads)]] void gemm_striped_##M##x##N##x##K(   \
      MARLIN_PRODUCT_BUFFERS, threadgroup uchar* shared [[threadgroup(0)]],                                   \
      uint stripe [[threadgroup_position_in_grid]], uint stripes [[threadgroups_per_grid]],                   \
      uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {           \
    striped_gemm<format, T, Tile<M, N, K>>(MARLIN_PRODUCT, params, shared, stripe, stripes, simdgroup, lane); \
  }

MARLIN_STRIPED_TILES(MARLIN_STRIPED_KERNEL)
MARLIN_FUNCTIONS(MARLIN_KERNELS_GEMM_STRIPED(MARLIN_INSTANTIATE))
