// Adds the partial sums of all splits of K in the order of k, adds the bias, and rounds once.
#include "kernels/shared/kernel_list.h"

#include "kernels/gemm/output.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void reduce(const device uchar* bias [[buffer(kSlotBias)]], device T* out [[buffer(kSlotOut)]],
                       const device float* partials [[buffer(kSlotPartials)]],
                       constant ReduceParams& params [[buffer(kSlotParams)]],
                       uint2 position [[thread_position_in_grid]]) {
  const uint n = position.x;
  const uint m = position.y;
  if (n >= params.N || m >= params.M) return;
  float sum = 0.0f;
  for (uint split = 0; split < params.splits; ++split)
    sum += partials[(ulong(split) * params.M + m) * params.N + n];
  Output<T>{bias, out, nullptr, params.M, params.N}.store(m, n, sum);
}

// Each z of the grid is one border between two stripes. If a tile contains several borders, only the threads of its
// first border add up the tile.
template <typename T>
[[kernel]] void reduce_striped(const device uchar* bias [[buffer(kSlotBias)]], device T* out [[buffer(kSlotOut)]],
                               const device float* partials [[buffer(kSlotPartials)]],
                               constant StripedReduceParams& params [[buffer(kSlotParams)]],
                               uint3 position [[thread_position_in_grid]]) {
  const uint tiles_m = ceil_divide(params.M, params.tile_M);
  const uint units = tiles_m * ceil_divide(params.N, params.tile_N) * params.slices;
  const uint border = stripe_begin(units, params.stripes, position.z + 1);
  const uint before = stripe_begin(units, params.stripes, position.z);
  const uint tile = border / params.slices;
  const uint tile_begin = tile * params.slices;
  const uint n = tile / tiles_m * params.tile_N + position.x;
  const uint m = tile % tiles_m * params.tile_M + position.y;
  if (border == tile_begin || before > tile_begin || n >= params.N || m >= params.M) return;

  const uint area = params.tile_M * params.tile_N;
  const uint element = position.y * params.tile_N + position.x;
  // The stripe before the border has summed the tile's first slices. Its sums are in the stripe's even entry of
  // `partials` if the tile is the stripe's first tile, and otherwise in the odd entry.
  float sum = partials[ulong(2 * position.z + (before == tile_begin ? 0 : 1)) * area + element];
  for (uint stripe = position.z + 1;; ++stripe) {
    const uint begin = stripe_begin(units, params.stripes, stripe);
    if (begin >= tile_begin + params.slices) break;
    sum += partials[ulong(2 * stripe) * area + element];
  }
  Output<T>{bias, out, nullptr, params.M, params.N}.store(m, n, sum);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_REDUCE(MARLIN_INSTANTIATE))
