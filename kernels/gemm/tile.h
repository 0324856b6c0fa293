// A tile of outputs, some k at a step: activations and exact half codes are staged in threadgroup memory, the scales of
// the groups that the step touches beside them. Sums of codes become sums of weights at the end of a group, in fp32.
#pragma once

#include "activations.h"
#include "fragment.h"
#include "weight.h"

namespace marlin {

template <uint m, uint n, uint k>
struct Tile {
  enum {
    kM = m,
    kN = n,
    kK = k,
    kThreads = tile_threads({m, n, k}),
    kGroups = tile_groups({m, n, k}),
    kOctetsPerRow = k / kCodesPerWord,
    kOctets = m * kOctetsPerRow,  // of activations
    kWords = n * kOctetsPerRow,
    kScales = n * kGroups,
    kBlocksM = kSimdgroupRows / kBlock,  // of a simdgroup's part
    kBlocksN = tile_simdgroup_columns({m, n, k}) / kBlock,
    kSimdgroupsN = n / (kBlocksN * kBlock),
    // Beside two sets of 4 x 4 accumulators there is no room to carry the next step's data: 512 threads have 208
    // half-registers each (M1, Mesa's table).
    kStoresEarly = kBlocksN > 2,
  };
};

// Threadgroup memory of one stage. Blocks of 8x8: activations [m / 8][k / 8], codes [k / 8][n / 8].
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

// Groups of 16 where a step is longer: the only ones that end inside a step.
template <typename Tile>
MARLIN_INLINE bool has_short_groups(constant GemmParams& params) {
  return Tile::kGroups > 1 && params.group_size < Tile::kK && params.group_size < params.K;
}

// What one thread carries from device memory to a stage: octets of activations, words, and one scale.
template <WeightFormat format, typename T, typename Tile>
struct Parcel {
  enum {
    kThreadOctets = ceil_divide(Tile::kOctets, Tile::kThreads),
    kThreadWords = ceil_divide(Tile::kWords, Tile::kThreads),
    kReloadsScale = Tile::kStoresEarly,  // at every step, and not once a group: no register is held for it
  };
  static_assert(Tile::kScales <= Tile::kThreads, "a scale per thread");

  Octet<T> x[kThreadOctets];
  uint words[kThreadWords];
  half zero_in_code[kThreadWords];
  float scale;
  float zero;
  uint scale_group;

  // Before the first fetch of a tile.
  MARLIN_INLINE void begin() {
    scale = 0.0f;
    zero = 0.0f;
    scale_group = ~0u;
  }

  // Whatever lies beyond M, N or k_end is replaced by zeros: exact ones, whose products add nothing.
  MARLIN_INLINE void fetch(thread const Weight& weight, thread const Activations<T>& a, constant GemmParams& params,
                           uint m0, uint n0, uint k0, uint k_end, uint thread_index) {
    MARLIN_UNROLL for (uint i = 0; i < kThreadOctets; ++i) {
      const uint octet = thread_index + i * Tile::kThreads;
      const uint m = m0 + octet / Tile::kOctetsPerRow;
      const uint k = k0 + octet % Tile::kOctetsPerRow * kCodesPerWord;
      x[i] = Octet<T>{};
      if (has_octet(octet) && m < params.M && k < k_end) x[i] = a.template load<T>(m, k);
    }
    MARLIN_UNROLL for (uint i = 0; i < kThreadWords; ++i) {
      const uint index = thread_index + i * Tile::kThreads;
      const uint n = n0 + index % Tile::kN;
      const uint k = k0 + index / Tile::kN * kCodesPerWord;
      words[i] = 0;
      // A table may hold NaN: the code of what lies beyond is one past its end, where there is a zero.
      zero_in_code[i] = format == WeightFormat::lut4 ? half(-kLutSize) : 0.0h;
      if (has_word(index) && n < params.N && k < k_end) {
        words[i] = weight.word(k, n);
        zero_in_code[i] = 0.0h;
        if (zero_is_in_code<format>()) zero_in_code[i] = half(weight.zero<format>(k / params.group_size, n));
      }
    }
    const uint n = n0 + thread_index % Tile::kN;
    const uint k = k0 + thread_index / Tile::kN * params.group_size;
    if (owns_scale(params, thread_index) && n < params.N && k < k_end) {
      const uint group = k / params.group_size;
      if (kReloadsScale || group != scale_group) {
        scale = weight.scale<format>(group, n);
        if (!zero_is_in_code<format>()) zero = weight.zero<format>(group, n);
        scale_group = group;
      }
    } else {
      scale = 0.0f;
      zero = 0.0f;
    }
  }

  MARLIN_INLINE void store(Stage<T, Tile> stage, constant GemmParams& params, uint thread_index) const {
    MARLIN_UNROLL for (uint i = 0; i < kThreadOctets; ++i) {
      const uint octet = thread_index + i * Tile::kThreads;
      if (!has_octet(octet)) continue;
      const uint m = octet / Tile::kOctetsPerRow;
      const uint block = m / kBlock * Tile::kOctetsPerRow + octet % Tile::kOctetsPerRow;
      threadgroup T* row = stage.activations + block * kBlockElements + m % kBlock * kBlock;
      MARLIN_UNROLL for (uint j = 0; j < kCodesPerWord; ++j) row[j] = x[i].k[j];
    }
    MARLIN_UNROLL for (uint i = 0; i < kThreadWords; ++i) {
      const uint index = thread_index + i * Tile::kThreads;
      if (!has_word(index)) continue;
      const uint n = index % Tile::kN;
      const Octet<half> codes = exact_codes<code_kind(format)>(words[i], zero_in_code[i]);
      const uint block = index / Tile::kN * (Tile::kN / kBlock) + n / kBlock;
      threadgroup half* column = stage.codes + block * kBlockElements + n % kBlock;
      MARLIN_UNROLL for (uint j = 0; j < kCodesPerWord; ++j) column[j * kBlock] = codes.k[j];
    }
    if (owns_scale(params, thread_index)) {
      stage.scales[thread_index] = scale;
      stage.zeros[thread_index] = zero;
    }
  }

 private:
  static MARLIN_INLINE bool has_octet(uint octet) {
    return Tile::kOctets % Tile::kThreads == 0 || octet < Tile::kOctets;
  }
  static MARLIN_INLINE bool has_word(uint index) { return Tile::kWords % Tile::kThreads == 0 || index < Tile::kWords; }
  static MARLIN_INLINE bool owns_scale(constant GemmParams& params, uint thread_index) {
    return thread_index < (has_short_groups<Tile>(params) ? uint(Tile::kScales) : uint(Tile::kN));
  }
};

// A simdgroup's part of the tile.
template <WeightFormat format, typename T, typename Tile>
struct TileSums {
  enum { kBlocksM = Tile::kBlocksM, kBlocksN = Tile::kBlocksN };
  typedef ActivationFragment<T> AFragment;
  typedef CodeFragment<code_kind(format)> WFragment;

  float total[kBlocksM][kBlocksN][2];
  simdgroup_matrix<float, kBlock, kBlock> sum[kBlocksM][kBlocksN];
  float x_sum[kBlocksM];  // of the lane's own elements
  uint chain_end;         // the k before which sum has to be scaled: a group's end, or the chain's

  static MARLIN_INLINE bool needs_x_sum() {
    return format == WeightFormat::uint4_bias || (format == WeightFormat::uint4 && !zero_is_in_code<format>());
  }
  static MARLIN_INLINE uint first_row(uint simdgroup) { return simdgroup / Tile::kSimdgroupsN * (kBlocksM * kBlock); }
  static MARLIN_INLINE uint first_column(uint simdgroup) {
    return simdgroup % Tile::kSimdgroupsN * (kBlocksN * kBlock);
  }

  MARLIN_INLINE void begin(constant GemmParams& params, uint k_begin, uint k_end) {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) total[i][j][0] = total[i][j][1] = 0.0f;
    }
    clear_chain();
    begin_chain(params, k_begin, k_end);
  }

  // Eight k of the stage.
  MARLIN_INLINE void multiply(Stage<T, Tile> stage, const threadgroup float* table, uint k_block, uint simdgroup,
                              uint lane) {
    const uint row_block = first_row(simdgroup) / kBlock;
    const uint column_block = first_column(simdgroup) / kBlock;
    typename WFragment::Matrix w[kBlocksN];
    MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
      const uint block = k_block * (Tile::kN / kBlock) + column_block + j;
      w[j] = WFragment::load(stage.codes + block * kBlockElements, lane, table);
    }
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      const uint block = (row_block + i) * Tile::kOctetsPerRow + k_block;
      typename AFragment::Matrix x = AFragment::load(stage.activations + block * kBlockElements, lane);
      if (needs_x_sum()) x_sum[i] += float(x.thread_elements()[0]) + float(x.thread_elements()[1]);
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) simdgroup_multiply_accumulate(sum[i][j], x, w[j], sum[i][j]);
    }
  }

  // The end of a group, or of a chain inside one: the sums of codes are scaled and join the totals.
  MARLIN_INLINE void finish_chain(Stage<T, Tile> stage, uint group_slot, uint simdgroup, uint lane) {
    const uint n = group_slot * Tile::kN + first_column(simdgroup) + lane_place(lane).column;
    float x[kBlocksM] = {};
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      if (!needs_x_sum()) continue;
      // The four lanes of a row differ in bits 0 and 3.
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

  // All k of the stage.
  MARLIN_INLINE void step(Stage<T, Tile> stage, constant GemmParams& params, const threadgroup float* table, uint k0,
                          uint k_end, uint simdgroup, uint lane) {
    const bool short_groups = has_short_groups<Tile>(params);
    MARLIN_UNROLL for (uint k_block = 0; k_block < Tile::kOctetsPerRow; ++k_block) {
      multiply(stage, table, k_block, simdgroup, lane);
      if (short_groups && k_block % 2 == 1) finish_chain(stage, k_block / 2, simdgroup, lane);
    }
    if (!short_groups && k0 + Tile::kK >= chain_end) {
      finish_chain(stage, 0, simdgroup, lane);
      begin_chain(params, k0 + Tile::kK, k_end);
    }
  }

  MARLIN_INLINE void begin_chain(constant GemmParams& params, uint k, uint k_end) {
    chain_end = min(min((k / params.group_size + 1) * params.group_size, k + kChainLength), k_end);
  }

 private:
  MARLIN_INLINE void clear_chain() {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
        sum[i][j] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
      x_sum[i] = 0.0f;
    }
  }
};

}  // namespace marlin
