// Parameters of the moe_ kernels, which multiply with the weights of experts, and of the table that moe_sort writes.
// For shaders and host, in the C subset of kernels/shared/types.h.
#pragma once

#include "kernels/gemm/geometry.h"

namespace marlin {

// The gated activation of moe_gemv_gated. The columns of gate and up are two halves of the weight, or they alternate.
struct MoeGate {
  int32_t activation;  // an Activation
  uint32_t interleaved;
  float limit;  // of clamped_silu and limited_silu
  float alpha;
};

// The parameters of a moe_gemm. A pair is a token and one of its slots, with the number token * top_k + slot. `product`
// describes the product with one expert's weight. However, product.M is the number of all pairs, and
// product.a_row_stride is the distance between tokens.
struct MoeParams {
  GemmParams product;
  int64_t a_slot_stride;  // elements; 0 if the slots of a token share one row
  uint32_t experts;
  uint32_t top_k;
  uint32_t id_bytes;                    // 4 for int32 ids, 8 for int64
  uint32_t global_scale_expert_stride;  // 1 or N
  uint32_t block_rows;                  // largest number of rows of a block of moe_sort
  uint32_t blocks;                      // number of entries in moe_sort's table
  int32_t row_weights_type;             // in moe_gemv_reduce: an ElementType, or -1 if there are none
  MoeGate gate;                         // in moe_gemv_gated
  uint32_t unused;
};
static_assert(sizeof(MoeParams) == 88, "shared with the shaders");

// out[row, n] = round(sum over the row's `terms` pairs of row_weights[pair] * (products[pair, n] + bias[expert, n]))
struct MoeReduceParams {
  uint32_t rows;
  uint32_t N;
  uint32_t terms;
  uint32_t experts;
  uint32_t id_bytes;
  int32_t row_weights_type;  // an ElementType, or -1 if there are none
};
static_assert(sizeof(MoeReduceParams) == 24, "shared with the shaders");

// The largest number of rows in a block of moe_gemv_blocks. The loops for one to four rows of fp16 need 7 KB together,
// so they fit in the M1's instruction cache of 12 KB (metal-benchmarks). The loops for one to eight rows would not fit.
enum { kMoeGemvRows = 4 };

// The limit of simdgroups in a threadgroup of moe_gemv_reduce. Each slot of a token has its own simdgroups, which split
// K between them. A thread uses at most 143 half-registers (Mesa's compiler), so a threadgroup on an M1 can have up to
// 22 simdgroups.
enum { kMoeReduceMaxSimdgroups = 20 };

// moe_sort runs as one threadgroup. It sorts the pairs of kMoeSortThreads experts at a time, with one thread per
// expert. The output begins with a table of three words for each block of rows: expert, first place, number of rows. An
// unused block has 0 rows. After the table come the pairs, sorted by expert.
enum {
  kMoeSortThreads = 256,
  kMoeSortSimdgroups = 8,
  kMoeBlockWords = 3,
};
static_assert(static_cast<int>(kMoeSortSimdgroups) * kSimdWidth == static_cast<int>(kMoeSortThreads),
              "whole simdgroups");

// Returns the largest number of blocks that `pairs` rows can need. Each expert may have one incomplete block. The rows
// whose ids are not numbers of experts form their own blocks, and one of these may be incomplete, too.
constexpr uint32_t moe_blocks(uint32_t pairs, uint32_t experts, uint32_t block_rows) {
  return ceil_divide(pairs, block_rows) + (pairs < experts + 1 ? pairs : experts + 1);
}

}  // namespace marlin
