// A few activation rows. A lane owns four columns: one 16-byte load holds 8 k of each, and no sum crosses lanes. K is
// split between the simdgroups of a threadgroup, whose sums meet in threadgroup memory, and between threadgroups, whose
// sums meet in reduce.metal; both in a fixed order.
#include "variants.h"

#include "product.h"

using namespace metal;
using namespace marlin;

// Whether the fp32 unit reads a subnormal half as it is: 2^-24 times 2^24.
[[kernel]] void probe_half_subnormals(const device uint* in [[buffer(kSlotPacked)]],
                                      device uint* out [[buffer(kSlotOut)]]) {
  const half2 smallest = as_type<half2>(in[0] & 0x000F000Fu);
  out[0] = fma(float(smallest.x), 16777216.0f, 0.0f) == 1.0f ? 1u : 0u;
}

namespace marlin {

// The sums of one lane over a slice of K: rows x its four columns.
template <WeightFormat format, typename T>
struct LaneSums {
  typedef FastCodes<code_kind(format)> Codes;

  Weight weight;
  Activations<T> a;
  uint lane;
  uint n;                               // the lane's first column, or N
  const device uint* words;             // of the next 8 k
  ulong scale_index;                    // of the next group
  const device T* x_row[kGemvMaxRows];  // at the next k; through perm where the row begins
  const threadgroup float* table;
  float total[kGemvMaxRows][kGemvColumnsPerLane];
  // Of the chain at hand.
  float even[kGemvMaxRows][kGemvColumnsPerLane];
  float odd[kGemvMaxRows][kGemvColumnsPerLane];
  float x_sum[kGemvMaxRows];

  static MARLIN_INLINE bool has_row(uint r) { return r < uint(rows_per_threadgroup); }

  // A chain of `length` k from k on: its activations are summed by the lanes together, four each.
  MARLIN_INLINE void begin_chain(uint k, uint length) {
    static_assert(kChainLength == 4 * kSimdWidth, "one load of four a lane");
    const uint quad = 4 * lane;
    MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) even[r][c] = odd[r][c] = 0.0f;
      if (!has_row(r) || code_kind(format) != CodeKind::integer) continue;
      vec<T, 4> x = vec<T, 4>(T(0.0f));
      if (quad < length) x = a.load_quad(x_row[r] + (has_perm ? 0 : quad), k + quad);
      x_sum[r] = simd_sum((float(x[0]) + float(x[1])) + (float(x[2]) + float(x[3])));
    }
  }

  MARLIN_INLINE void multiply(uint k) {
    const uint4 packed = load_columns(words, weight.N - n);
    words += weight.N;
    Octet<float> codes[kGemvColumnsPerLane];
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) codes[c] = Codes::decode(packed[c], table);
    MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
      if (!has_row(r)) continue;
      const Octet<float> x = a.template load_octet<float>(x_row[r], k);
      if (!has_perm) x_row[r] += kCodesPerWord;
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
        MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; i += 2) {
          even[r][c] = fma(codes[c].k[i], x.k[i], even[r][c]);
          thread float& rest = Codes::odd_differs ? odd[r][c] : even[r][c];
          rest = fma(codes[c].k[i + 1], x.k[i + 1], rest);
        }
      }
    }
  }

  // The chain lies in one group.
  MARLIN_INLINE void end_chain() {
    const float4 scales = weight.template scales_of_columns<format>(scale_index, n);
    const float4 zeros = weight.template zeros_of_columns<format>(scale_index, n);
    MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
      if (!has_row(r)) continue;
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
        const float codes = fma(odd[r][c], Codes::odd_unit(), even[r][c] * Codes::even_unit());
        total[r][c] += apply_group<format>(codes, x_sum[r], scales[c], zeros[c]);
      }
    }
  }
};

}  // namespace marlin

template <WeightFormat format, typename T>
[[kernel, max_total_threads_per_threadgroup(kGemvMaxSimdgroups* kSimdWidth)]] void gemv(
    MARLIN_PRODUCT_BUFFERS, threadgroup float* shared [[threadgroup(0)]], uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const Product<T> product = MARLIN_PRODUCT;
  const uint rows = rows_per_threadgroup;
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint m = block.y * rows;
  const uint n = block.x * kGemvColumns + lane * kGemvColumnsPerLane;
  const uint slice = block.z * simdgroups + simdgroup;
  const uint k_begin = slice * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);

  if (format == WeightFormat::lut4) {
    if (thread_index < kLutSize) shared[thread_index] = lut[thread_index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  LaneSums<format, T> sums{};
  sums.weight = product.weight;
  sums.a = product.a;
  sums.lane = lane;
  sums.n = min(n, params.N);
  sums.words = packed + ulong(k_begin / kCodesPerWord) * params.N + sums.n;
  sums.table = shared;
  // Rows beyond M repeat the last and are not stored.
  MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
    sums.x_row[r] = product.a.row_at(min(m + r, params.M - 1)) + (has_perm ? 0 : k_begin);
  }
  const uint first_group = k_begin / params.group_size;
  sums.scale_index = ulong(first_group) * params.N + sums.n;
  uint group_rest = (first_group + 1) * params.group_size - k_begin;
  for (uint k = k_begin; k < k_end;) {
    const uint length = min(min(group_rest, uint(kChainLength)), k_end - k);
    const uint chain_end = k + length;
    sums.begin_chain(k, length);
    for (; k < chain_end; k += kGemvK) {
      sums.multiply(k);
      if (!ragged_k || k + kCodesPerWord < chain_end) sums.multiply(k + kCodesPerWord);
    }
    k = chain_end;
    sums.end_chain();
    group_rest -= length;
    if (group_rest == 0) {
      group_rest = params.group_size;
      sums.scale_index += params.N;
    }
  }

  // The table lies where the sums go.
  if (format == WeightFormat::lut4) threadgroup_barrier(mem_flags::mem_threadgroup);
  MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
    if (!sums.has_row(r)) continue;
    threadgroup float* row = shared + (simdgroup * rows + r) * kGemvColumns;
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      row[lane * kGemvColumnsPerLane + c] = sums.total[r][c];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint outputs = rows * kGemvColumns;
  for (uint i = thread_index; i < outputs; i += simdgroups * kSimdWidth) {
    const uint row = m + i / kGemvColumns;
    const uint column = block.x * kGemvColumns + i % kGemvColumns;
    if (row >= params.M || column >= params.N) continue;
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s)
      sum += shared[s * outputs + i];
    product.output.store_slice(block.z, row, column, sum);
  }
}

MARLIN_KERNELS_GEMV(MARLIN_INSTANTIATE)
