// Adds the bias to each pair's product and multiplies the sum by the pair's row weight. Adds up the results of a token
// in the order of its slots, and rounds once.
#include "kernels/shared/kernel_list.h"

#include "kernels/experts/experts.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void moe_reduce(const device uchar* bias [[buffer(kSlotBias)]], device T* out [[buffer(kSlotOut)]],
                           const device float* partials [[buffer(kSlotPartials)]],
                           const device uchar* ids [[buffer(kSlotExpertIds)]],
                           const device uchar* row_weights [[buffer(kSlotRowWeights)]],
                           constant MoeReduceParams& params [[buffer(kSlotParams)]],
                           uint2 position [[thread_position_in_grid]]) {
  const uint n = position.x;
  const uint row = position.y;
  if (n >= params.N || row >= params.rows) return;
  float sum = 0.0f;
  for (uint pair = row * params.terms; pair < (row + 1) * params.terms; ++pair) {
    const uint expert = expert_of(ids, pair, params.id_bytes, params.experts);
    if (expert == params.experts) continue;
    const float term = term_of(partials[ulong(pair) * params.N + n], bias_of(bias, expert, n, params.N),
                               weight_of(row_weights, pair, params.row_weights_type));
    sum += term;
  }
  out[ulong(row) * params.N + n] = T(sum);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MOE_REDUCE(MARLIN_INSTANTIATE))
