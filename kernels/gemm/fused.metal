// Five activation rows and more: y^T = W^T a^T in 8x8x8 products whose operands are built in registers from device
// loads, without threadgroup memory, barrier or shuffle. K is split between the simdgroups of a threadgroup, whose
// totals meet in threadgroup memory, and between threadgroups, whose sums meet in reduce.metal; both in a fixed order.
//
// Fragment row v of column block b stands for column 4 v + b of the strip, so that a lane's words of four blocks are
// one 16-byte load and a simdgroup reads 128 contiguous bytes of a packed row. Fragment columns stand for k as in
// weight_fragment.h, so that a lane's activations over the four steps of a word are one load of four from each row.
#include "variants.h"

#include "product.h"
#include "weight_fragment.h"

using namespace metal;
using namespace marlin;

namespace marlin {

enum {
  kFusedRowBlocks = kFusedMaxRows / kBlock,
  kFusedColumnBlocks = kFusedColumns / kBlock,
  kFusedWordRows = 4,  // packed rows of one load
  kFusedLoadK = kFusedWordRows * kCodesPerWord,
};

// A threadgroup's rows begin at `begin`; where fewer are left than it takes, it and its row blocks move up to end with
// the last row, over rows that others own too: no load is conditional, and addresses differ by the same strides for
// all.
struct FusedRows {
  uint M;
  uint begin;

  MARLIN_INLINE uint first() const { return min(begin, max(M, uint(rows_per_threadgroup)) - rows_per_threadgroup); }
  MARLIN_INLINE uint block(uint i) const { return min(i * kBlock, max(M, uint(kBlock)) - kBlock); }
};

// The sums of one simdgroup over its slice of K.
template <WeightFormat format, typename T>
struct FusedSums {
  typedef simdgroup_matrix<float, kBlock, kBlock> Matrix;
  typedef FastCodes<code_kind(format)> Codes;

  Weight weight;
  Activations<T> a;
  uint n;                    // the lane's first column
  uint word;                 // the lane's packed row among the four of a load
  uint quad;                 // the lane's four k among the 32 of a load
  const device uint* words;  // of the next load
  uint scale_index;          // of the next scales: the planner refuses weights with 2^32 of them
  // The lane's two rows of block 0, at the next step's first k of its own; through perm where the rows begin.
  const device T* x_row[2];
  vec<T, 4> x[kFusedRowBlocks][2];      // the lane's four k of both
  int64_t row_offset[kFusedRowBlocks];  // of the other blocks, the same for all lanes and threadgroups
  uint pair;                            // the distance of two loads of two: 2
  const threadgroup float* table;
  ColumnDecode<format> decode[kFusedColumnBlocks];
  Matrix sum[kFusedRowBlocks][kFusedColumnBlocks];

  static MARLIN_INLINE bool has_block(uint i) { return i * kBlock < uint(rows_per_threadgroup); }

  // Where one load of all rows takes 64 half-registers: 231 a thread (M1), and a core would hold two threadgroups of
  // what the planner takes, five simdgroups. By pairs it is 207, and three.
  static MARLIN_INLINE bool loads_pairs() { return sizeof(T) == 4 && rows_per_threadgroup == kFusedMaxRows; }

  // What step j needs, and those after it up to the next load. The second pair's distance is no constant to the
  // compiler, which would join two loads at constant distances into one.
  MARLIN_INLINE void load_activations(uint j, uint k_quad, bool has_quad) {
    MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const device T* first = x_row[e] + row_offset[i];
        if (j == 0) x[i][e] = vec<T, 4>(T(0.0f));
        if (!has_block(i) || !has_quad) continue;
        if (!loads_pairs()) {
          if (j == 0) x[i][e] = a.load_quad(first, k_quad);
        } else if (j % 2 == 0) {
          const uint skipped = j == 0 ? 0 : pair;
          const vec<T, 2> loaded = a.load_pair(first + (has_perm ? 0 : skipped), k_quad + skipped);
          x[i][e][j] = loaded[0];
          x[i][e][j + 1] = loaded[1];
        }
      }
    }
  }

  MARLIN_INLINE void load_scales() {
    const float4 scales = weight.template scales_of_columns<format>(scale_index, n);
    const float4 zeros = weight.template zeros_of_columns<format>(scale_index, n);
    MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) decode[b].set(scales[b], zeros[b]);
  }

  MARLIN_INLINE void clear() {
    MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
      MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) {
        if (has_block(i)) sum[i][b] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
    }
  }

  // 32 k from k0 on. What lies beyond k_end is selected away from both operands.
  MARLIN_INLINE void multiply(uint k0, uint k_end) {
    const uint k_word = k0 + word * kCodesPerWord;
    const uint k_quad = k0 + quad;
    const bool has_word = !ragged_k || k_word < k_end;
    const bool has_quad = !ragged_k || k_quad < k_end;

    uint4 packed = uint4(0);
    if (has_word) {
      packed = load_columns(words, weight.N - n);
      if (short_group_size != 0) load_scales();
    }
    words += ulong(weight.N) * kFusedWordRows;
    if (short_group_size != 0) scale_index += weight.N * (kFusedLoadK / short_group_size);
    MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
      load_activations(j, k_quad, has_quad);
      Matrix activations[kFusedRowBlocks];
      MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
        if (!has_block(i)) continue;
        activations[i].thread_elements()[0] = float(x[i][0][j]);
        activations[i].thread_elements()[1] = float(x[i][1][j]);
      }
      MARLIN_UNROLL for (uint b = 0; b < kFusedColumnBlocks; ++b) {
        const float2 codes = Codes::pair(packed[b], j, table, ColumnDecode<format>::form());
        const float low = decode[b].weight(codes.x, j);
        const float high = decode[b].weight(codes.y, j);
        Matrix weights;
        weights.thread_elements()[0] = has_word ? low : 0.0f;
        weights.thread_elements()[1] = has_word ? high : 0.0f;
        MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
          if (has_block(i)) simdgroup_multiply_accumulate(sum[i][b], weights, activations[i], sum[i][b]);
        }
      }
    }
    if (!has_perm) {
      x_row[0] += kFusedLoadK;
      x_row[1] += kFusedLoadK;
    }
  }

  // The sums join the simdgroup's totals, of which each lane touches its own: [row block, element][lane], four columns
  // each.
  MARLIN_INLINE void add_to(threadgroup float4* totals) {
    MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        if (!has_block(i)) continue;
        totals[(2 * i + e) * kSimdWidth] += float4(sum[i][0].thread_elements()[e], sum[i][1].thread_elements()[e],
                                                   sum[i][2].thread_elements()[e], sum[i][3].thread_elements()[e]);
      }
    }
  }
};

}  // namespace marlin

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kFusedMaxSimdgroups* kSimdWidth)]] void gemm_fused(
    MARLIN_PRODUCT_BUFFERS, threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const Product<T> product = MARLIN_PRODUCT;
  const uint parts = uint(rows_per_threadgroup) / 4;  // float4s of a lane: two a row block
  threadgroup float* slices = load_table<format>(shared, lut, simdgroup * kSimdWidth + lane);
  threadgroup float4* totals = reinterpret_cast<threadgroup float4*>(slices) + lane;
  threadgroup float4* own = totals + simdgroup * parts * kSimdWidth;

  const LanePlace place = lane_place(lane);
  const FusedRows rows{params.M, params.m_begin + block.y * rows_per_threadgroup};
  const uint n = block.x * kFusedColumns + place.row * kFusedColumnBlocks;
  const uint slice = block.z * simdgroups + simdgroup;
  const uint k_begin = slice * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);

  FusedSums<format, T> sums;
  sums.weight = product.weight;
  sums.a = product.a;
  // Columns beyond N are zero: they fill rows of the product that are not stored.
  sums.n = min(n, params.N);
  sums.word = place.column / 2;
  sums.quad = place.row * 4;
  sums.words = packed + ulong(k_begin / kCodesPerWord + sums.word) * params.N + sums.n;
  sums.pair = min(params.K, 2u);
  sums.table = shared;
  MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
    const uint m = rows.first() + min(place.column + e, params.M - 1);
    sums.x_row[e] = product.a.row_at(m) + (has_perm ? 0 : k_begin + sums.quad);
  }
  MARLIN_UNROLL for (uint i = 0; i < kFusedRowBlocks; ++i) {
    sums.row_offset[i] = int64_t(rows.block(i)) * params.a_row_stride;
  }

  for (uint part = 0; part < parts; ++part)
    own[part * kSimdWidth] = float4(0.0f);
  const uint first_group = (k_begin + (short_group_size != 0 ? sums.word * kCodesPerWord : 0)) / params.group_size;
  sums.scale_index = first_group * params.N + sums.n;
  uint group_rest = (first_group + 1) * params.group_size - k_begin;  // where groups are long
  for (uint k = k_begin; k < k_end;) {
    sums.clear();
    const uint chain_end = min(k + kFusedChainLength, k_end);
    for (; k < chain_end; k += kFusedK) {
      if (short_group_size == 0) {
        sums.load_scales();
        group_rest -= kFusedK;
        if (group_rest == 0) {
          group_rest = params.group_size;
          sums.scale_index += params.N;
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
    const uint i = part / 2;
    const uint row = rows.block(i) + place.column + part % 2;
    const uint m = rows.first() + row;
    // Rows that an earlier block or threadgroup has are its to store.
    if (row < i * kBlock || m < rows.begin || m >= params.M || n >= params.N) continue;
    float4 total = float4(0.0f);
    for (uint s = 0; s < simdgroups; ++s)
      total += totals[(s * parts + part) * kSimdWidth];
    product.output.store_columns(block.z, m, n, total);
  }
}

MARLIN_KERNELS_GEMM_FUSED(MARLIN_INSTANTIATE)
