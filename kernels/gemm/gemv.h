// The body of the kernels for products with at most kGemvMaxRows rows of activations. Each lane owns four columns of
// the weight. One 16-byte load gives the lane 32 codes of 4 bits: 8 values along K of each column (8-bit codes need two
// loads). No other lane of the simdgroup adds to these columns. K is split twice: between the simdgroups of a
// threadgroup, which add their sums in threadgroup memory, and between threadgroups, whose sums reduce.metal adds. Both
// additions have a fixed order, so the same inputs give the same bits.
#pragma once

#include "kernels/gemm/product.h"

namespace marlin {

// The smallest activation that is multiplied with codes scaled down by 2^24. The product is at least 2^-88, so it is
// far above the subnormals of fp32.
constant constexpr float kSmallActivation = 5.42101086e-20f;  // 2^-64

// The accumulators of one lane over a slice of K (all rows, its four columns), and the addresses of its next loads.
// `most_rows` is the number of rows; rows_per_threadgroup may reduce it.
template <WeightFormat format, typename T, uint most_rows>
struct GemvAccumulators {
  typedef FastCodesOf<format> Codes;

  Weight weight;
  Activations<T> a;
  uint lane;
  uint n;                            // the lane's first column, at most N
  const device uint* words;          // the words of the next 8 k
  ulong scale_index;                 // index of the current group's scales
  const device T* x_row[most_rows];  // address of the row's next k or, with a permutation, of the row's start
  const threadgroup float* table;
  threadgroup float4* totals;  // sums of the lane's four columns; the sums of the next row are kSimdWidth further
  // Accumulators of the current chain. A chain is a run of at most kChainLength k of one group, which are summed before
  // they are scaled.
  float even[most_rows][kGemvColumnsPerLane];
  float odd[most_rows][kGemvColumnsPerLane];

  static MARLIN_INLINE uint rows() { return min(uint(rows_per_threadgroup), most_rows); }

  // Returns true if odd nibbles have their own accumulators. This saves shifts, but doubles the number of accumulators.
  // With many rows, they need too many registers: with 8 rows on an M1, a thread would use 253 half-registers instead
  // of 199.
  static MARLIN_INLINE bool separate_odd() {
    return code_kind(format) == CodeKind::integer && words_per_block(format) == 1 && rows() <= kGemvMaxSeparateOddRows;
  }
  static MARLIN_INLINE DecodeOptions form(bool subnormal) { return {subnormal, separate_odd()}; }
  static MARLIN_INLINE bool has_row(uint r) { return r < rows(); }

  MARLIN_INLINE void clear_totals() thread {
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      if (has_row(r)) totals[r * kSimdWidth] = float4(0.0f);
    }
  }

  // Loads one row's activations for a chain, four per lane.
  MARLIN_INLINE vec<T, 4> load_chain(const device T* row, uint k, uint length) const thread {
    static_assert(kChainLength == 4 * kSimdWidth, "one load of four activations per lane covers a chain");
    const uint quad = 4 * lane;
    if (quad >= length) return vec<T, 4>(T(0.0f));
    return a.load_quad(row + (has_perm ? 0 : quad), k + quad);
  }

  // Returns true if activations can be too small for the fast decode. It scales codes down by up to 2^24, so the
  // product with a very small activation could be subnormal in fp32 and lose bits. fp16 has no such activations,
  // because its smallest nonzero value is 2^-24. Codes of a table are not scaled down.
  static constexpr bool checks_activations() { return !is_same_v<T, half> && code_kind(format) != CodeKind::table; }

  // Returns true if an activation is nonzero and smaller than kSmallActivation.
  MARLIN_INLINE bool has_small_activations(uint k, uint length) const thread {
    if (!checks_activations()) return false;
    bool found = false;
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      if (!has_row(r)) continue;
      const vec<T, 4> quad = load_chain(x_row[r], k, length);
      MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
        const float size = abs(float(quad[i]));
        found = found || (size < kSmallActivation && size != 0.0f);
      }
    }
    return simd_any(found);
  }

  // The words of 8 k of the lane's four columns.
  struct ColumnWords {
    uint4 row[words_per_block(format)];
    uint4 high;
  };

  // The activations of 8 k. Rows that the threadgroup does not have are undefined.
  struct ActivationRows {
    Vec8<T> row[most_rows];
  };

  // Returns the words of the second plane for the 16 k of a step, which begin at k. They are shifted so that the fields
  // of the first eight k come first.
  MARLIN_INLINE uint4 high_words(uint k) const thread {
    if (!has_high_plane(format)) return uint4(0);
    return load_columns(weight.high + weight.template high_index<format>(k) + n, weight.N - n) >>
           high_shift_of<format>(k);
  }

  MARLIN_INLINE ColumnWords next_words(uint4 high) thread {
    ColumnWords packed;
    packed.high = high;
    MARLIN_UNROLL for (uint i = 0; i < words_per_block(format); ++i) {
      packed.row[i] = load_columns(words, weight.N - n);
      words += weight.N;
    }
    return packed;
  }

  template <typename R>
  MARLIN_INLINE Vec8<R> next_activations(uint r, uint k) thread {
    const Vec8<R> x = a.template load_vec8<R>(x_row[r], k);
    if (!has_perm) x_row[r] += kBlockK;
    return x;
  }

  MARLIN_INLINE ActivationRows next_rows(uint k) thread {
    ActivationRows x;
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      if (has_row(r)) x.row[r] = next_activations<T>(r, k);
    }
    return x;
  }

  // Returns true if a step loads the words of its 16 k, and the activations of all rows, before it multiplies them. The
  // loop then waits for memory once per step instead of twice, and more rows cause no more waits. Returns false in two
  // cases. With many rows, the activations would need too many registers: with 8 rows on an M1, a thread would use 231
  // half-registers instead of 199. With a table, the lookups wait between the products in any case.
  static MARLIN_INLINE bool loads_first() { return gemv_loads_first(format, rows()); }
  // Returns true if a step loads the activations between its two loads of words. Otherwise it loads all words first.
  // The wait for the second load is short in both orders. With four rows on an M1, activations between the words need 2
  // % fewer instructions. With one or three rows, it takes fewer instructions to load all words first.
  static MARLIN_INLINE bool rows_between_words() { return rows() == kGemvMaxLoadsFirstRows; }

  // Multiplies the 8 k of `packed` by the activations of all rows. If loads_first() is true, `loaded` contains these
  // activations. Otherwise `loaded` is unused, and each row's activations are loaded just before their products.
  template <bool subnormal>
  MARLIN_INLINE void multiply(ColumnWords packed, uint k, ActivationRows loaded) thread {
    Vec8<float> codes[kGemvColumnsPerLane];
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
        const float2 pair =
            Codes::pair(packed.row[word_of_pair<format>(j)][c], packed.high[c], j, table, form(subnormal));
        codes[c].k[first_of_pair<format>(j)] = pair.x;
        codes[c].k[second_of_pair<format>(j)] = pair.y;
      }
    }
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      if (!has_row(r)) continue;
      Vec8<float> x;
      if (loads_first()) {
        MARLIN_UNROLL for (uint i = 0; i < kBlockK; ++i) x.k[i] = float(loaded.row[r].k[i]);
      } else {
        x = next_activations<float>(r, k);
      }
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
        MARLIN_UNROLL for (uint i = 0; i < kBlockK; i += 2) {
          even[r][c] = fma(codes[c].k[i], x.k[i], even[r][c]);
          if (separate_odd()) {
            odd[r][c] = fma(codes[c].k[i + 1], x.k[i + 1], odd[r][c]);
          } else {
            even[r][c] = fma(codes[c].k[i + 1], x.k[i + 1], even[r][c]);
          }
        }
      }
    }
  }

  // Multiplies a chain of `length` k from k on. All of them are in one group.
  template <bool subnormal>
  MARLIN_INLINE void multiply_chain(uint k, uint length) thread {
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) even[r][c] = odd[r][c] = 0.0f;
    }
    for (uint i = k; i < k + length; i += kGemvK) {
      const bool is_whole = !ragged_k || i + kBlockK < k + length;
      const uint4 high = high_words(i);
      const uint4 second_high = high >> high_shift_of<format>(kBlockK);
      const ColumnWords first = next_words(high);
      ColumnWords second = ColumnWords{};
      ActivationRows rows;
      if (loads_first() && !rows_between_words() && is_whole) second = next_words(second_high);
      if (loads_first()) rows = next_rows(i);
      if (loads_first() && rows_between_words() && is_whole) second = next_words(second_high);
      multiply<subnormal>(first, i, rows);
      if (!is_whole) continue;
      if (loads_first()) {
        rows = next_rows(i + kBlockK);
      } else {
        second = next_words(second_high);
      }
      multiply<subnormal>(second, i + kBlockK, rows);
    }
  }

  MARLIN_INLINE void end_chain(uint k, uint length, bool subnormal) thread {
    const float even_unit = Codes::even_unit(form(subnormal));
    const float odd_unit = Codes::odd_unit(form(subnormal));
    const float4 scales = weight.template scales_of_columns<format>(scale_index, k, n);
    const float4 zeros = weight.template zeros_of_columns<format>(scale_index, k, n);
    MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) {
      if (!has_row(r)) continue;
      float x_sum = 0.0f;
      if (code_kind(format) == CodeKind::integer) {
        const vec<T, 4> quad = load_chain(x_row[r] - (has_perm ? 0 : length), k, length);
        x_sum = simd_sum((float(quad[0]) + float(quad[1])) + (float(quad[2]) + float(quad[3])));
      }
      float4 total = totals[r * kSimdWidth];
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
        float codes = even[r][c] * even_unit;
        if (separate_odd()) codes = fma(odd[r][c], odd_unit, codes);
        total[c] += apply_group<format>(codes, x_sum, scales[c], zeros[c]);
      }
      totals[r * kSimdWidth] = total;
    }
  }
};

// The rows that a threadgroup multiplies: `count` rows of the activations from a_row on. The results are stored in the
// output rows from out_row on. A row beyond the last one reads the last row and is not stored.
struct GemvPlace {
  uint a_row;
  uint out_row;
  uint count;

  template <typename T>
  MARLIN_INLINE const device T* start(const thread Activations<T>& a, uint row) const thread {
    return a.row_at(a_row + min(row, count - 1));
  }
  MARLIN_INLINE bool stores(uint row, thread uint& m) const thread {
    m = out_row + row;
    return row < count;
  }
};

// Adds `count` values in order: values[first], then every value that is `stride` further.
template <typename V>
MARLIN_INLINE V sum_in_order(const threadgroup V* values, uint first, uint count, uint stride) {
  V sum = V(0.0f);
  for (uint i = 0; i < count; ++i)
    sum += values[i * stride + first];
  return sum;
}

// Computes the products of one simdgroup over its slice of K, for at most `most_rows` rows. `n` is the lane's first
// column. `totals` has space for kGemvColumns sums of each row.
template <WeightFormat format, typename T, uint most_rows = kGemvMaxRows, typename Rows>
MARLIN_INLINE void gemv_slice(const thread Product<T>& product, const thread Rows& rows, constant GemmParams& params,
                              const threadgroup float* table, threadgroup float* totals, uint slice, uint n,
                              uint lane) {
  const uint N = product.weight.N;
  const uint k_begin = slice * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);
  GemvAccumulators<format, T, most_rows> sums{};
  sums.weight = product.weight;
  sums.a = product.a;
  sums.lane = lane;
  sums.n = min(n, N);
  sums.words = product.weight.packed + ulong(k_begin / codes_per_word(format)) * N + sums.n;
  MARLIN_UNROLL for (uint r = 0; r < most_rows; ++r) sums.x_row[r] =
      rows.start(product.a, r) + (has_perm ? 0 : k_begin);
  sums.table = table;
  sums.totals = reinterpret_cast<threadgroup float4*>(totals) + lane;
  sums.clear_totals();
  const uint first_group = k_begin / params.group_size;
  sums.scale_index = ulong(first_group) * N + sums.n;
  uint group_rest = (first_group + 1) * params.group_size - k_begin;
  for (uint k = k_begin; k < k_end;) {
    const uint length = min(min(group_rest, uint(kChainLength)), k_end - k);
    const bool subnormal = subnormal_codes && !sums.has_small_activations(k, length);
    if (subnormal) {
      sums.template multiply_chain<true>(k, length);
    } else if (!subnormal_codes || sums.checks_activations()) {
      sums.template multiply_chain<false>(k, length);
    }
    sums.end_chain(k, length, subnormal);
    k += length;
    group_rest -= length;
    if (group_rest == 0) {
      group_rest = params.group_size;
      sums.scale_index += N;
    }
  }
}

// The body of gemv, moe_gemv and moe_gemv_blocks. `block` is the threadgroup's position in the grid: y selects the
// columns, and z the split of K.
template <WeightFormat format, typename T, uint most_rows = kGemvMaxRows, typename Rows>
MARLIN_INLINE void gemv_rows(const thread Product<T>& product, const thread Rows& rows, constant GemmParams& params,
                             threadgroup float* shared, uint3 block, uint lane, uint simdgroup, uint simdgroups) {
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint outputs = GemvAccumulators<format, T, most_rows>::rows() * kGemvColumns;
  threadgroup float* slices = load_table<format>(shared, product.lut, thread_index);
  gemv_slice<format, T, most_rows>(product, rows, params, shared, slices + simdgroup * outputs,
                                   block.z * simdgroups + simdgroup,
                                   block.y * kGemvColumns + lane * kGemvColumnsPerLane, lane);

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < outputs; i += simdgroups * kSimdWidth) {
    uint m = 0;
    const uint column = block.y * kGemvColumns + i % kGemvColumns;
    if (!rows.stores(i / kGemvColumns, m) || column >= product.weight.N) continue;
    product.output.store_split(block.z, m, column, sum_in_order(slices, i, simdgroups, outputs));
  }
}

}  // namespace marlin
