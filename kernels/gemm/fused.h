// The body of the kernels that compute y^T = W^T a^T in 8x8x8 products. Both operands are built in registers directly
// from device loads, so the K loop needs no threadgroup memory, no barrier and no shuffle. The simdgroups of a
// threadgroup split K between them and add their totals in threadgroup memory. K is also split between threadgroups,
// and reduce.metal adds their partial sums. Both sums have a fixed order, so the same inputs give the same bits.
//
// Row v of weight fragment b is column 4 v + b of the simdgroup's 32 columns. So one 16-byte load gives a lane its
// words of all four fragments, and a simdgroup reads 128 contiguous bytes of a packed row. The columns of a fragment
// are k, in the order of weight_fragment.h. In this order, one load of four activations per row is enough for all four
// fragments of a word.
#pragma once

#include "kernels/gemm/product.h"
#include "kernels/gemm/weight_fragment.h"

namespace marlin {

enum {
  kFusedRowBlocks = kFusedMaxRows / kBlock,
  kFusedColumnBlocks = kFusedColumns / kBlock,
  kFusedWordRows = 4,                      // packed rows per load of a simdgroup; twice as many for 8-bit codes
  kFusedLoadK = kFusedWordRows * kBlockK,  // half of a step, which is kFusedK
  kFusedByteWordK = kFusedLoadK / 2,       // distance in k between the two words of 8-bit codes that a lane loads
};

// Evenly spaced rows from `begin` on. If the last threadgroup has fewer than rows_per_threadgroup rows, its row blocks
// move up until they end at row M - 1. It then also computes some rows of another threadgroup, and does not store them.
// So no load is conditional, and all threadgroups use the same row offsets.
struct EvenRows {
  // A lane has one pointer for each of its two rows of block 0. The offset from block 0 to another block is the same
  // for both rows, all lanes and all threadgroups.
  typedef int64_t Offset;
  static constexpr uint pointers() { return 2; }
  static constexpr uint offsets_per_block() { return 1; }

  uint M;
  uint begin;

  MARLIN_INLINE uint first() const thread {
    return min(begin, max(M, uint(rows_per_threadgroup)) - rows_per_threadgroup);
  }
  MARLIN_INLINE uint block(uint i) const thread { return min(i * kBlock, max(M, uint(kBlock)) - kBlock); }

  template <typename T>
  MARLIN_INLINE const device T* pointer(const thread Activations<T>& a, uint row) const thread {
    return a.row_at(first() + min(row, M - 1));
  }
  template <typename T>
  MARLIN_INLINE Offset offset(const thread Activations<T>& a, uint i, uint) const thread {
    return int64_t(block(i)) * a.row_stride;
  }

  // Sets m to the output row of row `row` in block i. Returns false if another block or threadgroup stores that row.
  MARLIN_INLINE bool stores(uint i, uint row, thread uint& m) const thread {
    const uint moved = block(i) + row;
    m = first() + moved;
    return moved >= i * kBlock && m >= begin && m < M;
  }
};

// The accumulators of one simdgroup over its slice of K, and the addresses of its next loads. `row_blocks` is the
// number of row blocks; rows_per_threadgroup may reduce it.
template <WeightFormat format, typename T, uint row_blocks, typename Rows>
struct FusedAccumulators {
  typedef simdgroup_matrix<float, kBlock, kBlock> Matrix;
  typedef FastCodesOf<format> Codes;
  typedef ColumnDecode<format, (row_blocks < kFusedRowBlocks)> Decode;

  Weight weight;
  Activations<T> a;
  uint n;                    // the lane's first column
  uint word;                 // the lane's row among the four rows of words of a load
  uint quad;                 // the lane's first k among the 32 of a load
  const device uint* words;  // the lane's next words, of four columns
  const device uint* high;   // the same for the second plane
  uint high_shift;           // the first bit of the block's fields in `high`
  uint scale_index;          // index of the next scales; 32 bits are sufficient, because the planner refuses larger
                             // weights
  // The lane's two rows of block i start at x_row + row_offset[i]. The pointers are at the lane's first k of the next
  // load, or with a permutation at k = 0. `Rows` defines the number of different pointers and offsets.
  const device T* x_row[2];
  typename Rows::Offset row_offset[row_blocks][2];
  vec<T, 4> x[row_blocks][2];  // four k of each of the two rows
  uint opaque_two;             // always 2, the offset of the second load_pair(); see load_activations()
  const threadgroup float* table;
  Decode decode[kFusedColumnBlocks];
  Matrix sum[row_blocks][kFusedColumnBlocks];

  static MARLIN_INLINE bool has_block(uint i) { return i * kBlock < uint(rows_per_threadgroup); }

  // Returns true if each load fetches the activations of two fragments instead of four. For 8-bit codes, one load
  // cannot fetch four, because the k of the last two are kFusedByteWordK after those of the first two. With 32 rows of
  // fp32, loads of four fragments need 231 half-registers per thread, and loads of two need 207. With 207, an M1 core
  // holds three instead of two threadgroups of the size that the planner chooses, five simdgroups.
  static MARLIN_INLINE bool loads_pairs() {
    return is_wide() || (sizeof(T) == 4 && row_blocks == kFusedRowBlocks && rows_per_threadgroup == kFusedMaxRows);
  }
  static constexpr bool is_wide() { return words_per_block(format) == 2; }
  // Returns the distance in k from the first word or quad of a load to that of fragment j.
  static MARLIN_INLINE uint skipped_k(uint j) { return word_of_pair<format>(j) * kFusedByteWordK; }

  // Loads the activations for fragment j: for all four fragments if j is 0, or for j and j + 1 if loads_pairs(). The
  // offset of the second pair is deliberately opaque to the compiler, which would otherwise merge the two loads.
  MARLIN_INLINE void load_activations(uint j, uint k_quad, bool has_quad) thread {
    MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const uint skipped = j == 0 ? 0 : is_wide() ? skipped_k(j) : opaque_two;
        const device T* start = x_row[e % Rows::pointers()] + (loads_pairs() && !has_perm ? skipped : 0);
        const device T* first = start + row_offset[i][e % Rows::offsets_per_block()];
        if (j == 0) x[i][e] = vec<T, 4>(T(0.0f));
        if (!has_block(i) || !has_quad) continue;
        if (!loads_pairs()) {
          if (j == 0) x[i][e] = a.load_quad(first, k_quad);
        } else if (j % 2 == 0) {
          const vec<T, 2> loaded = a.load_pair(first, k_quad + skipped);
          x[i][e][j] = loaded[0];
          x[i][e][j + 1] = loaded[1];
        }
      }
    }
  }

  MARLIN_INLINE void load_scales(uint k) thread {
    const float4 scales = weight.template scales_of_columns<format>(scale_index, k, n);
    const float4 zeros = weight.template zeros_of_columns<format>(scale_index, k, n);
    MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) decode[b].set(scales[b], zeros[b]);
  }

  MARLIN_INLINE void clear() thread {
    MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
      MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) {
        if (has_block(i)) sum[i][b] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
    }
  }

  // Multiplies 32 k from k0 on. Both operands are zero at k_end and beyond.
  MARLIN_INLINE void multiply(uint k0, uint k_end) thread {
    const uint k_word = k0 + word * codes_per_word(format);
    const uint k_quad = k0 + quad;
    const bool has_two_groups = is_wide() && short_group_size == kMinGroupSize;

    uint4 packed[words_per_block(format)];
    MARLIN_UNROLL for (uint i = 0; i < words_per_block(format); ++i) {
      packed[i] = uint4(0);
      if (!ragged_k || k_word + i * kFusedByteWordK < k_end) packed[i] = load_columns(words, weight.N - n);
      words += ulong(weight.N) * kFusedWordRows;
    }
    uint4 high_words = uint4(0);
    if (has_high_plane(format)) {
      if (!ragged_k || k_word < k_end) high_words = load_columns(high, weight.N - n) >> high_shift;
      high += ulong(weight.N) * (kFusedLoadK / k_per_high_word(high_bits(format)));
    }
    MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
      const bool has_word = !ragged_k || k_word + skipped_k(j) < k_end;
      const bool has_quad = !ragged_k || k_quad + skipped_k(j) < k_end;
      if (short_group_size != 0 && (j == 0 || (has_two_groups && j == 2))) {
        if (has_word) load_scales(k_word + skipped_k(j));
        scale_index += weight.N * (has_two_groups ? 1 : kFusedLoadK / short_group_size);
      }
      load_activations(j, k_quad, has_quad);
      Matrix activations[row_blocks];
      MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
        if (!has_block(i)) continue;
        activations[i].thread_elements()[0] = float(x[i][0][j]);
        activations[i].thread_elements()[1] = float(x[i][1][j]);
      }
      MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) {
        const float2 codes = Codes::pair(packed[word_of_pair<format>(j)][b], high_words[b], j, table, Decode::form());
        const float low = decode[b].weight(codes.x, j);
        const float high = decode[b].weight(codes.y, j);
        Matrix weights;
        weights.thread_elements()[0] = has_word ? low : 0.0f;
        weights.thread_elements()[1] = has_word ? high : 0.0f;
        MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
          if (has_block(i)) simdgroup_multiply_accumulate(sum[i][b], weights, activations[i], sum[i][b]);
        }
      }
    }
    MARLIN_UNROLL for (uint e = 0; e < Rows::pointers(); ++e) {
      if (!has_perm) x_row[e] += kFusedLoadK;
    }
  }

  // Adds the accumulators to the simdgroup's totals. For each [row block, element][lane], the totals have a float4 of
  // four columns. A lane accesses only its own totals.
  MARLIN_INLINE void add_to(threadgroup float4* totals) thread {
    MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        if (!has_block(i)) continue;
        totals[(2 * i + e) * kSimdWidth] += float4(sum[i][0].thread_elements()[e], sum[i][1].thread_elements()[e],
                                                   sum[i][2].thread_elements()[e], sum[i][3].thread_elements()[e]);
      }
    }
  }
};

// The common body of the kernels: multiplies a threadgroup's rows with columns block.x, over split block.z of K. The
// threadgroup has at most `row_blocks` row blocks.
template <WeightFormat format, typename T, uint row_blocks = kFusedRowBlocks, typename Rows>
MARLIN_INLINE void fused_rows(const thread Product<T>& product, const thread Rows& rows, constant GemmParams& params,
                              threadgroup float* shared, uint3 block, uint lane, uint simdgroup, uint simdgroups) {
  const uint N = product.weight.N;
  const uint parts = 2 * min(uint(rows_per_threadgroup) / kBlock, row_blocks);  // float4s per lane
  threadgroup float* slices = load_table<format>(shared, product.lut, simdgroup * kSimdWidth + lane);
  threadgroup float4* totals = reinterpret_cast<threadgroup float4*>(slices) + lane;
  threadgroup float4* own = totals + simdgroup * parts * kSimdWidth;

  const LanePlace place = lane_place(lane);
  const uint n = block.x * kFusedColumns + place.row * kFusedColumnBlocks;
  const uint slice = block.z * simdgroups + simdgroup;
  const uint k_begin = slice * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);

  FusedAccumulators<format, T, row_blocks, Rows> sums;
  sums.weight = product.weight;
  sums.a = product.a;
  // Columns at N and beyond load zero and are not stored.
  sums.n = min(n, N);
  sums.word = place.column / 2;
  sums.quad = place.row * (sums.is_wide() ? 2 : 4);
  sums.words = product.weight.packed + ulong(k_begin / codes_per_word(format) + sums.word) * N + sums.n;
  if (has_high_plane(format)) {
    const uint k_word = k_begin + sums.word * kBlockK;
    sums.high = product.weight.high + product.weight.template high_index<format>(k_word) + sums.n;
    sums.high_shift = high_shift_of<format>(k_word);
  }
  sums.opaque_two = min(params.K, 2u);
  sums.table = shared;
  MARLIN_UNROLL for (uint e = 0; e < Rows::pointers(); ++e) {
    sums.x_row[e] = rows.pointer(product.a, place.column + e) + (has_perm ? 0 : k_begin + sums.quad);
  }
  MARLIN_UNROLL for (uint i = 0; i < row_blocks; ++i) {
    MARLIN_UNROLL for (uint e = 0; e < Rows::offsets_per_block(); ++e) {
      sums.row_offset[i][e] = rows.offset(product.a, i, place.column + e);
    }
  }

  for (uint part = 0; part < parts; ++part)
    own[part * kSimdWidth] = float4(0.0f);
  const uint first_group =
      (k_begin + (short_group_size != 0 ? sums.word * codes_per_word(format) : 0)) / params.group_size;
  sums.scale_index = first_group * N + sums.n;
  uint group_rest = (first_group + 1) * params.group_size - k_begin;  // used only if short_group_size is 0
  for (uint k = k_begin; k < k_end;) {
    sums.clear();
    const uint chain_end = min(k + kFusedChainLength, k_end);
    for (; k < chain_end; k += kFusedK) {
      if (short_group_size == 0) {
        sums.load_scales(k);
        group_rest -= kFusedK;
        if (group_rest == 0) {
          group_rest = params.group_size;
          sums.scale_index += N;
        }
      }
      MARLIN_UNROLL for (uint load = 0; load < kFusedK / kFusedLoadK; ++load) {
        sums.multiply(k + load * kFusedLoadK, k_end);
      }
    }
    sums.add_to(own);
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint part = simdgroup; part < parts; part += simdgroups) {
    uint m = 0;
    if (n >= N || !rows.stores(part / 2, place.column + part % 2, m)) continue;
    float4 total = float4(0.0f);
    for (uint s = 0; s < simdgroups; ++s)
      total += totals[(s * parts + part) * kSimdWidth];
    product.output.store_columns(block.z, m, n, total);
  }
}

}  // namespace marlin
