// Computes a tile of outputs in steps of Tile::kK k. Each step stages its operands in threadgroup memory: activations,
// codes decoded exactly to half, and the scales of the groups in the step. Sums over codes are scaled in fp32 at the
// end of each group.
#pragma once

#include "kernels/gemm/activations.h"
#include "kernels/gemm/fragment.h"
#include "kernels/gemm/weight.h"

namespace marlin {

template <uint m, uint n, uint k>
struct Tile {
  enum {
    kM = m,
    kN = n,
    kK = k,
    kThreads = tile_threads({m, n, k}),
    kGroups = tile_groups({m, n, k}),
    kVec8PerRow = k / kBlockK,
    kVec8 = m * kVec8PerRow,  // runs of eight activations in the tile
    kWords = n * kVec8PerRow,
    kScales = n * kGroups,
    kBlocksM = kSimdgroupRows / kBlock,  // 8x8 blocks of one simdgroup's outputs, counted from top to bottom
    kBlocksN = tile_simdgroup_columns({m, n, k}) / kBlock,
    kSimdgroupsN = n / (kBlocksN * kBlock),
    // True if the next step's data are stored in threadgroup memory before the current step's products. With two sets
    // of 4 x 4 accumulators, no registers are free for these data during the products: in a threadgroup of 512 threads,
    // each thread has 208 half-registers (M1, Mesa's table).
    kStoresEarly = kBlocksN > 2,
  };
};

// The threadgroup memory of one stage. Activations are stored as [m / 8][k / 8] blocks of 8x8, and codes as [k / 8][n /
// 8] blocks of 8x8.
template <typename T, typename Tile>
struct Stage {
  threadgroup T* activations;
  threadgroup half* codes;
  threadgroup float* scales;  // [Tile::kGroups][Tile::kN]
  threadgroup float* zeros;   // [Tile::kGroups][Tile::kN]
};

template <typename T, typename Tile>
MARLIN_INLINE Stage<T, Tile> stage_at(threadgroup uchar* memory) {
  threadgroup T* activations = reinterpret_cast<threadgroup T*>(memory);
  threadgroup half* codes = reinterpret_cast<threadgroup half*>(activations + Tile::kM * Tile::kK);
  threadgroup float* scales = reinterpret_cast<threadgroup float*>(codes + Tile::kK * Tile::kN);
  return {activations, codes, scales, scales + Tile::kScales};
}

// Returns true if a group can end inside a step, so a step needs several scales per column. This happens only with
// group size 16 in tiles whose kK is 32.
template <typename Tile>
MARLIN_INLINE bool has_short_groups(constant GemmParams& params) {
  return Tile::kGroups > 1 && params.group_size < Tile::kK && params.group_size < params.K;
}

// Loads the activations, words and scale of one thread for a step, and stores them in a stage.
template <WeightFormat format, typename T, typename Tile>
struct TileLoader {
  enum {
    kThreadVec8 = ceil_divide(Tile::kVec8, Tile::kThreads),
    kThreadWords = ceil_divide(Tile::kWords, Tile::kThreads),
    kReloadsScale = Tile::kStoresEarly,  // loads the scale in every step, so that no register holds it during the group
  };
  static_assert(Tile::kScales <= Tile::kThreads, "a thread stages at most one scale");

  Vec8<T> x[kThreadVec8];
  BlockWords<format> words[kThreadWords];
  half zero_in_code[kThreadWords];
  float scale;
  float zero;
  uint scale_group;

  // Starts a tile. Must be called before the tile's first fetch().
  MARLIN_INLINE void begin() thread {
    scale = 0.0f;
    zero = 0.0f;
    scale_group = ~0u;
  }

  // Loads this thread's activations, words and scale for the step at k0. Elements at or beyond M, N or k_end are
  // replaced by exact zeros, whose products add nothing.
  MARLIN_INLINE void fetch(thread const Weight& weight, thread const Activations<T>& a, constant GemmParams& params,
                           uint m0, uint n0, uint k0, uint k_end, uint thread_index) thread {
    MARLIN_UNROLL for (uint i = 0; i < kThreadVec8; ++i) {
      const uint vec8 = thread_index + i * Tile::kThreads;
      const uint m = m0 + vec8 / Tile::kVec8PerRow;
      const uint k = k0 + vec8 % Tile::kVec8PerRow * kBlockK;
      x[i] = Vec8<T>{};
      if (has_vec8(vec8) && m < params.M && k < k_end) x[i] = a.template load<T>(m, k);
    }
    MARLIN_UNROLL for (uint i = 0; i < kThreadWords; ++i) {
      const uint index = thread_index + i * Tile::kThreads;
      const uint n = n0 + index % Tile::kN;
      const uint k = k0 + index / Tile::kN * kBlockK;
      words[i] = BlockWords<format>{};
      // A code outside the weight must decode to zero. For a format with a table, the code becomes the index after the
      // last entry, where a zero is stored, because any entry of the table may be NaN.
      zero_in_code[i] = has_lut(format) ? half(-kLutSize) : 0.0h;
      if (has_word(index) && n < params.N && k < k_end) {
        words[i] = weight.template block<format>(k, n);
        zero_in_code[i] = 0.0h;
        if (zero_is_in_code<format>()) zero_in_code[i] = half(weight.zero<format>(k, n));
      }
    }
    const uint n = n0 + thread_index % Tile::kN;
    const uint k = k0 + thread_index / Tile::kN * params.group_size;
    if (owns_scale(params, thread_index) && n < params.N && k < k_end) {
      const uint group = k / params.group_size;
      if (kReloadsScale || group != scale_group) {
        scale = weight.scale<format>(k, n);
        if (!zero_is_in_code<format>()) zero = weight.zero<format>(k, n);
        scale_group = group;
      }
    } else {
      scale = 0.0f;
      zero = 0.0f;
    }
  }

  MARLIN_INLINE void store(Stage<T, Tile> stage, constant GemmParams& params, uint thread_index) const thread {
    MARLIN_UNROLL for (uint i = 0; i < kThreadVec8; ++i) {
      const uint vec8 = thread_index + i * Tile::kThreads;
      if (!has_vec8(vec8)) continue;
      const uint m = vec8 / Tile::kVec8PerRow;
      const uint block = m / kBlock * Tile::kVec8PerRow + vec8 % Tile::kVec8PerRow;
      threadgroup T* row = stage.activations + block * kBlockElements + m % kBlock * kBlock;
      MARLIN_UNROLL for (uint j = 0; j < kBlockK; ++j) row[j] = x[i].k[j];
    }
    MARLIN_UNROLL for (uint i = 0; i < kThreadWords; ++i) {
      const uint index = thread_index + i * Tile::kThreads;
      if (!has_word(index)) continue;
      const uint n = index % Tile::kN;
      const Vec8<half> codes = exact_codes<format>(words[i], zero_in_code[i]);
      const uint block = index / Tile::kN * (Tile::kN / kBlock) + n / kBlock;
      threadgroup half* column = stage.codes + block * kBlockElements + n % kBlock;
      MARLIN_UNROLL for (uint j = 0; j < kBlockK; ++j) column[j * kBlock] = codes.k[j];
    }
    if (owns_scale(params, thread_index)) {
      stage.scales[thread_index] = scale;
      stage.zeros[thread_index] = zero;
    }
  }

 private:
  static MARLIN_INLINE bool has_vec8(uint vec8) { return Tile::kVec8 % Tile::kThreads == 0 || vec8 < Tile::kVec8; }
  static MARLIN_INLINE bool has_word(uint index) { return Tile::kWords % Tile::kThreads == 0 || index < Tile::kWords; }
  static MARLIN_INLINE bool owns_scale(constant GemmParams& params, uint thread_index) {
    return thread_index < (has_short_groups<Tile>(params) ? uint(Tile::kScales) : uint(Tile::kN));
  }
};

// The accumulators of the outputs that one simdgroup computes.
template <WeightFormat format, typename T, typename Tile>
struct TileAccumulators {
  enum { kBlocksM = Tile::kBlocksM, kBlocksN = Tile::kBlocksN };
  typedef ActivationFragment<T> AFragment;
  typedef CodeFragment<code_kind(format)> WFragment;

  float total[kBlocksM][kBlocksN][2];
  simdgroup_matrix<float, kBlock, kBlock> sum[kBlocksM][kBlocksN];
  float x_sum[kBlocksM];  // sums of the activations that the lane holds
  uint chain_end;         // the k at which `sum` is scaled and added to `total`: the end of a group or of a chain

  static MARLIN_INLINE bool needs_x_sum() {
    return zeros_role(format) != ZerosRole::none && !zero_is_in_code<format>();
  }
  static MARLIN_INLINE uint first_row(uint simdgroup) { return simdgroup / Tile::kSimdgroupsN * (kBlocksM * kBlock); }
  static MARLIN_INLINE uint first_column(uint simdgroup) {
    return simdgroup % Tile::kSimdgroupsN * (kBlocksN * kBlock);
  }

  MARLIN_INLINE void begin(constant GemmParams& params, uint k_begin, uint k_end) thread {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) total[i][j][0] = total[i][j][1] = 0.0f;
    }
    clear_chain();
    begin_chain(params, k_begin, k_end);
  }

  // Multiplies eight k of the stage.
  MARLIN_INLINE void multiply(Stage<T, Tile> stage, const threadgroup float* table, uint k_block, uint simdgroup,
                              uint lane) thread {
    const uint row_block = first_row(simdgroup) / kBlock;
    const uint column_block = first_column(simdgroup) / kBlock;
    typename WFragment::Matrix w[kBlocksN];
    MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
      const uint block = k_block * (Tile::kN / kBlock) + column_block + j;
      w[j] = WFragment::load(stage.codes + block * kBlockElements, lane, table);
    }
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      const uint block = (row_block + i) * Tile::kVec8PerRow + k_block;
      typename AFragment::Matrix x = AFragment::load(stage.activations + block * kBlockElements, lane);
      if (needs_x_sum()) x_sum[i] += float(x.thread_elements()[0]) + float(x.thread_elements()[1]);
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) simdgroup_multiply_accumulate(sum[i][j], x, w[j], sum[i][j]);
    }
  }

  // Scales the sums over codes and adds them to the totals, at the end of a group or of a chain inside a group.
  MARLIN_INLINE void finish_chain(Stage<T, Tile> stage, uint group_slot, uint simdgroup, uint lane) thread {
    const uint n = group_slot * Tile::kN + first_column(simdgroup) + lane_place(lane).column;
    float x[kBlocksM] = {};
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      if (!needs_x_sum()) continue;
      // The indices of the four lanes that share a row differ in bits 0 and 3, so two shuffles add up the sums of these
      // lanes.
      x[i] = x_sum[i] + simd_shuffle_xor(x_sum[i], 1);
      x[i] += simd_shuffle_xor(x[i], 8);
    }
    MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const uint column = n + j * kBlock + e;
        const float scale = stage.scales[column];
        const float zero = needs_x_sum() ? stage.zeros[column] : 0.0f;
        MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
          total[i][j][e] += apply_group<format>(sum[i][j].thread_elements()[e], x[i], scale, zero);
        }
      }
    }
    clear_chain();
  }

  // Multiplies all k of the stage.
  MARLIN_INLINE void step(Stage<T, Tile> stage, constant GemmParams& params, const threadgroup float* table, uint k0,
                          uint k_end, uint simdgroup, uint lane) thread {
    const bool short_groups = has_short_groups<Tile>(params);
    MARLIN_UNROLL for (uint k_block = 0; k_block < Tile::kVec8PerRow; ++k_block) {
      multiply(stage, table, k_block, simdgroup, lane);
      if (short_groups && k_block % 2 == 1) finish_chain(stage, k_block / 2, simdgroup, lane);
    }
    if (!short_groups && k0 + Tile::kK >= chain_end) {
      finish_chain(stage, 0, simdgroup, lane);
      begin_chain(params, k0 + Tile::kK, k_end);
    }
  }

  MARLIN_INLINE void begin_chain(constant GemmParams& params, uint k, uint k_end) thread {
    chain_end = min(min((k / params.group_size + 1) * params.group_size, k + kChainLength), k_end);
  }

 private:
  MARLIN_INLINE void clear_chain() thread {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
        sum[i][j] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
      x_sum[i] = 0.0f;
    }
  }
};

}  // namespace marlin
