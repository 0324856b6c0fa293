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

// Sums of one slice of K: rows x the lane's four columns.
template <WeightFormat format, typename T>
struct LaneSums {
  typedef SumCodes<code_kind(format)> Codes;

  float total[kGemvMaxRows][kGemvColumnsPerLane];

  // Columns beyond N are not read; column n is within N.
  MARLIN_INLINE bool owns(uint n, uint c, uint N) const { return vector_columns || n + c < N; }

  MARLIN_INLINE uint4 words(thread const Weight& weight, uint k, uint n) const {
    const device uint* source = weight.packed + ulong(k / kCodesPerWord) * weight.N + n;
    if (vector_columns) return *reinterpret_cast<const device uint4*>(source);
    uint4 result = uint4(0);
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      if (owns(n, c, weight.N)) result[c] = source[c];
    }
    return result;
  }

  // k_begin to k_end lie in one group.
  MARLIN_INLINE void add_chain(thread const Weight& weight, thread const Activations<T>& a, uint m, uint rows, uint n,
                               uint k_begin, uint k_end, const threadgroup float* table) {
    float even[kGemvMaxRows][kGemvColumnsPerLane] = {};
    float odd[kGemvMaxRows][kGemvColumnsPerLane] = {};
    float x_sum[kGemvMaxRows] = {};
    for (uint k = k_begin; k < k_end; k += kCodesPerWord) {
      const uint4 packed = words(weight, k, n);
      Octet<typename Codes::Code> codes[kGemvColumnsPerLane];
      MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) codes[c] = Codes::decode(packed[c], table);
      MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
        if (r >= rows) continue;
        const Octet<float> x = a.template load<float>(m + r, k);
        MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) x_sum[r] += x.k[i];
        MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
          MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; i += 2) {
            even[r][c] = fma(float(codes[c].k[i]), x.k[i], even[r][c]);
            odd[r][c] = fma(float(codes[c].k[i + 1]), x.k[i + 1], odd[r][c]);
          }
        }
      }
    }
    const uint group = k_begin / weight.group_size;
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      if (!owns(n, c, weight.N)) continue;
      const float scale = weight.scale<format>(group, n + c);
      const float zero = weight.zero<format>(group, n + c);
      MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
        total[r][c] += apply_group<format>(Codes::sum(even[r][c], odd[r][c]), x_sum[r], scale, zero);
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
  const uint thread_index = simdgroup * kSimdWidth + lane;
  const uint n = block.x * kGemvColumns + lane * kGemvColumnsPerLane;
  const uint m = block.y * rows_per_threadgroup;
  const uint rows = min(uint(rows_per_threadgroup), params.M - m);
  const uint slice = block.z * simdgroups + simdgroup;
  const uint k_begin = slice * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);

  if (format == WeightFormat::lut4) {
    if (thread_index < kLutSize) shared[thread_index] = lut[thread_index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const Product<T> product = MARLIN_PRODUCT;
  LaneSums<format, T> sums{};
  if (n < params.N) {
    for (uint k = k_begin; k < k_end;) {
      const uint group_end = (k / params.group_size + 1) * params.group_size;
      const uint chain_end = min(min(group_end, k + kChainLength), k_end);
      sums.add_chain(product.weight, product.a, m, rows, n, k, chain_end, shared);
      k = chain_end;
    }
  }

  // The table lies where the sums go.
  if (format == WeightFormat::lut4) threadgroup_barrier(mem_flags::mem_threadgroup);
  MARLIN_UNROLL for (uint r = 0; r < kGemvMaxRows; ++r) {
    if (r >= rows) continue;
    threadgroup float* row = shared + (simdgroup * rows + r) * kGemvColumns;
    MARLIN_UNROLL for (uint c = 0; c < kGemvColumnsPerLane; ++c) {
      row[lane * kGemvColumnsPerLane + c] = sums.total[r][c];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint outputs = rows * kGemvColumns;
  for (uint i = thread_index; i < outputs; i += simdgroups * kSimdWidth) {
    const uint column = block.x * kGemvColumns + i % kGemvColumns;
    if (column >= params.N) continue;
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s)
      sum += shared[s * outputs + i];
    product.output.store_slice(block.z, m + i / kGemvColumns, column, sum);
  }
}

MARLIN_KERNELS_GEMV(MARLIN_INSTANTIATE)
