// One 64 x 64 output tile, 32 k at a step: activations and exact half codes are staged in threadgroup memory, the
// scales of the groups that the step touches beside them. Sums of codes become sums of weights at the end of a group,
// in fp32.
#pragma once

#include "activations.h"
#include "fragment.h"
#include "weight.h"

namespace marlin {

// Threadgroup memory of one stage. Blocks of 8x8: activations [m / 8][k / 8], codes [k / 8][n / 8].
template <typename T>
struct Stage {
  threadgroup T* activations;
  threadgroup half* codes;
  threadgroup float* scales;  // [kTileGroups][kTileN]
  threadgroup float* zeros;   // [kTileGroups][kTileN]
};

template <typename T>
MARLIN_INLINE Stage<T> stage_at(threadgroup uchar* memory) {
  threadgroup T* activations = reinterpret_cast<threadgroup T*>(memory);
  threadgroup half* codes = reinterpret_cast<threadgroup half*>(activations + kTileM * kTileK);
  threadgroup float* scales = reinterpret_cast<threadgroup float*>(codes + kTileK * kTileN);
  return {activations, codes, scales, scales + kTileGroups * kTileN};
}

// Groups of 16: the only ones that end inside a step.
MARLIN_INLINE bool has_short_groups(constant GemmParams& params) {
  return params.group_size < kTileK && params.group_size < params.K;
}

// What one thread carries from device memory to a stage: 8 k of a row, one word of a column, one scale.
template <WeightFormat format, typename T>
struct Parcel {
  Octet<T> x;
  uint word;
  half zero_in_code;
  float scale;
  float zero;

  // Whatever lies beyond M, N or k_end is replaced by zeros: exact ones, whose products add nothing.
  MARLIN_INLINE void fetch(thread const Weight& weight, thread const Activations<T>& a, constant GemmParams& params,
                           uint m0, uint n0, uint k0, uint k_end, uint thread_index) {
    const uint m = m0 + thread_index / (kTileK / kCodesPerWord);
    const uint k_x = k0 + thread_index % (kTileK / kCodesPerWord) * kCodesPerWord;
    x = Octet<T>{};
    if (m < params.M && k_x < k_end) x = a.template load<T>(m, k_x);

    const uint n = n0 + thread_index % kTileN;
    const uint k_word = k0 + thread_index / kTileN * kCodesPerWord;
    word = 0;
    // A table may hold NaN: the code of what lies beyond is one past its end, where there is a zero.
    zero_in_code = format == WeightFormat::lut4 ? half(-kLutSize) : 0.0h;
    if (n < params.N && k_word < k_end) {
      word = weight.word(k_word, n);
      zero_in_code = 0.0h;
      if (zero_is_in_code<format>()) zero_in_code = half(weight.zero<format>(k_word / params.group_size, n));
    }

    const uint k_scale = k0 + thread_index / kTileN * params.group_size;
    scale = 0.0f;
    zero = 0.0f;
    if (owns_scale(params, thread_index) && n < params.N && k_scale < k_end) {
      scale = weight.scale<format>(k_scale / params.group_size, n);
      if (!zero_is_in_code<format>()) zero = weight.zero<format>(k_scale / params.group_size, n);
    }
  }

  MARLIN_INLINE void store(Stage<T> stage, constant GemmParams& params, uint thread_index) const {
    const uint m = thread_index / (kTileK / kCodesPerWord);
    const uint k_block = thread_index % (kTileK / kCodesPerWord);
    threadgroup T* row =
        stage.activations + (m / kBlock * (kTileK / kBlock) + k_block) * kBlockElements + m % kBlock * kBlock;
    MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) row[i] = x.k[i];

    const uint n = thread_index % kTileN;
    const Octet<half> codes = exact_codes<code_kind(format)>(word, zero_in_code);
    threadgroup half* column =
        stage.codes + (thread_index / kTileN * (kTileN / kBlock) + n / kBlock) * kBlockElements + n % kBlock;
    MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) column[i * kBlock] = codes.k[i];

    if (owns_scale(params, thread_index)) {
      stage.scales[thread_index] = scale;
      stage.zeros[thread_index] = zero;
    }
  }

 private:
  static MARLIN_INLINE bool owns_scale(constant GemmParams& params, uint thread_index) {
    return thread_index < (has_short_groups(params) ? uint(kTileGroups) : 1u) * kTileN;
  }
};

// A simdgroup's part of the tile: 32 rows x 16 columns.
template <WeightFormat format, typename T>
struct TileSums {
  enum { kBlocksM = 4, kBlocksN = 2, kSimdgroupsN = kTileN / (kBlocksN * kBlock) };
  typedef ActivationFragment<T> AFragment;
  typedef CodeFragment<code_kind(format)> WFragment;

  float total[kBlocksM][kBlocksN][2];
  simdgroup_matrix<float, kBlock, kBlock> sum[kBlocksM][kBlocksN];
  float x_sum[kBlocksM];  // of the lane's own elements
  uint chain;             // terms in sum

  static MARLIN_INLINE bool needs_x_sum() {
    return format == WeightFormat::uint4_bias || (format == WeightFormat::uint4 && !zero_is_in_code<format>());
  }
  static MARLIN_INLINE uint first_row(uint simdgroup) { return simdgroup / kSimdgroupsN * (kBlocksM * kBlock); }
  static MARLIN_INLINE uint first_column(uint simdgroup) { return simdgroup % kSimdgroupsN * (kBlocksN * kBlock); }

  MARLIN_INLINE void clear() {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) total[i][j][0] = total[i][j][1] = 0.0f;
    }
    clear_chain();
  }

  // Eight k of the stage.
  MARLIN_INLINE void multiply(Stage<T> stage, const threadgroup float* table, uint k_block, uint simdgroup, uint lane) {
    const uint row_block = first_row(simdgroup) / kBlock;
    const uint column_block = first_column(simdgroup) / kBlock;
    typename WFragment::Matrix w[kBlocksN];
    MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
      const uint block = k_block * (kTileN / kBlock) + column_block + j;
      w[j] = WFragment::load(stage.codes + block * kBlockElements, lane, table);
    }
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      const uint block = (row_block + i) * (kTileK / kBlock) + k_block;
      typename AFragment::Matrix x = AFragment::load(stage.activations + block * kBlockElements, lane);
      if (needs_x_sum()) x_sum[i] += float(x.thread_elements()[0]) + float(x.thread_elements()[1]);
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) simdgroup_multiply_accumulate(sum[i][j], x, w[j], sum[i][j]);
    }
  }

  // The end of a group, or of a chain inside one: the sums of codes are scaled and join the totals.
  MARLIN_INLINE void finish_chain(Stage<T> stage, uint group_slot, uint simdgroup, uint lane) {
    const uint n = group_slot * kTileN + first_column(simdgroup) + lane_place(lane).column;
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      float x = 0.0f;
      if (needs_x_sum()) {
        // The four lanes of a row differ in bits 0 and 3.
        x = x_sum[i] + simd_shuffle_xor(x_sum[i], 1);
        x += simd_shuffle_xor(x, 8);
      }
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
        MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
          const uint column = n + j * kBlock + e;
          const float codes = sum[i][j].thread_elements()[e];
          const float zero = needs_x_sum() ? stage.zeros[column] : 0.0f;
          total[i][j][e] += apply_group<format>(codes, x, stage.scales[column], zero);
        }
      }
    }
    clear_chain();
  }

  // All k of the stage. is_last: the slice ends here.
  MARLIN_INLINE void step(Stage<T> stage, constant GemmParams& params, const threadgroup float* table, uint k0,
                          bool is_last, uint simdgroup, uint lane) {
    const bool short_groups = has_short_groups(params);
    MARLIN_UNROLL for (uint k_block = 0; k_block < kTileK / kBlock; ++k_block) {
      multiply(stage, table, k_block, simdgroup, lane);
      if (short_groups && k_block % 2 == 1) finish_chain(stage, k_block / 2, simdgroup, lane);
    }
    chain += kTileK;
    const bool is_group_end = (k0 + kTileK) % params.group_size == 0;
    if (!short_groups && (is_group_end || is_last || chain >= kChainLength)) finish_chain(stage, 0, simdgroup, lane);
  }

 private:
  MARLIN_INLINE void clear_chain() {
    MARLIN_UNROLL for (uint i = 0; i < kBlocksM; ++i) {
      MARLIN_UNROLL for (uint j = 0; j < kBlocksN; ++j) {
        sum[i][j] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
      x_sum[i] = 0.0f;
    }
    chain = 0;
  }
};

}  // namespace marlin
