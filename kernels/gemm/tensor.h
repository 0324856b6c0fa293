// The body of the kernels for the tensor units of the M5. They compute y^T = W^T a^T in products of 16 x 32 x 16, whose
// operands and sums are in registers. Codes enter the product exactly, as integers or E2M1 values, and the sums are
// scaled in fp32 at the end of each group. Both operands come directly from device loads, so the kernel needs no
// threadgroup memory and no barrier.
//
// Operands are half or bfloat. Float operands without relaxed precision would have another layout, and would be no
// faster than simdgroup matrices: an M5 multiplies them in blocks of 8 x 8, too. Tables are not supported, because
// their entries need floats.
//
// A left operand is 16 columns of the weight, and a right operand is 32 rows of activations. A simdgroup computes 32
// columns of 32 rows, so it has two left operands, f = 0 and f = 1. Row v of the upper half of operand f is column 4 v
// + 2 f of the simdgroup's columns, and row v of the lower half is column 4 v + 2 f + 1. So one 16-byte load gives a
// lane its words of both left operands. The lane that decodes a column also holds the sums of this column, so it needs
// no scale of another column.
#pragma once

#include "kernels/gemm/product.h"
#include "kernels/gemm/tensor_layout.h"

namespace marlin {

enum {
  kTensorLeft = kTensorColumns / 16,  // left operands of a simdgroup
  kTensorQuads = kTensorRows / 8,     // groups of 8 rows; a lane loads activations of one row in each
};

// A lane's elements of an operand or of the sums, in the order of tensor_place.
template <typename R, uint count>
struct TensorElements {
  R e[count];
};

// Adds the product of a left operand (16 columns x 16 k) and a right operand (32 rows x 16 k) to the sums.
template <typename R>
MARLIN_INLINE void tensor_multiply(const thread TensorElements<R, 8>& left, const thread TensorElements<R, 16>& right,
                                   thread TensorElements<float, 16>& sum) {
  auto product = tensor_product();
  auto a = product.template get_left_input_cooperative_tensor<R, R, float>();
  auto b = product.template get_right_input_cooperative_tensor<R, R, float>();
  auto c = product.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(a)>,
                                                               remove_addrspace_t<decltype(b)>, float>();
  MARLIN_UNROLL for (ushort i = 0; i < 8; ++i) a[i] = left.e[i];
  MARLIN_UNROLL for (ushort i = 0; i < 16; ++i) b[i] = right.e[i];
  MARLIN_UNROLL for (ushort i = 0; i < 16; ++i) c[i] = sum.e[i];
  product.run(a, b, c);
  MARLIN_UNROLL for (ushort i = 0; i < 16; ++i) sum.e[i] = c[i];
}

// The sums of one simdgroup over its slice of K, and the addresses that it reads.
template <WeightFormat format, typename T>
struct TensorAccumulators {
  typedef TensorElements<float, 16> Sums;

  Weight weight;
  Activations<T> a;
  uint n;                               // the lane's first column
  uint quad;                            // the index of the lane's four k in an operand, 0..3
  const device T* x_row[kTensorQuads];  // rows of activations, at k = 0
  float4 scales, zeros;                 // the group's scales and zeros for the lane's columns
  Sums sum[kTensorLeft];
  Sums total[kTensorLeft];
  Sums x_sum;  // for each element of `sum`, the sum of the activations over the same k

  // Returns true if the codes are multiplied by their scales before the product.
  static constexpr bool has_scaled_codes() { return tensor_scales_codes(format); }
  // Returns true if integers are decoded to multiples of 2^-9, which needs fewer instructions. Only half operands use
  // this decode, because bfloat activations can be so small that the sums would become subnormal.
  static MARLIN_INLINE bool has_small_codes() {
    return subnormal_codes && code_kind(format) == CodeKind::integer && is_same_v<T, half>;
  }
  static MARLIN_INLINE bool needs_x_sum() {
    return zeros_role(format) != ZerosRole::none && !zero_is_in_code<format>();
  }
  // In groups of 16, each product of 16 k has its own scale. A lane then decodes only half of a block: half of a word
  // of 4-bit codes, or the single word of 8-bit codes that it loads.
  static MARLIN_INLINE bool takes_half_words() { return short_group_size != 0 && !has_scaled_codes(); }
  static MARLIN_INLINE uint step() { return takes_half_words() ? kTensorK / 2 : kTensorK; }

  // Returns the end of the sums that begin at k: the end of the group, or of a chain inside the group.
  static MARLIN_INLINE uint chain_end(uint k, uint group_size, uint k_end) {
    const uint longest = min(k + kChainLength, k_end);
    return has_scaled_codes() ? longest : min((k / group_size + 1) * group_size, longest);
  }

  // Starts the sums at k, with the scales of its group.
  MARLIN_INLINE void begin_chain(uint k) thread {
    const uint index = k / weight.group_size * weight.N + n;
    MARLIN_UNROLL for (uint f = 0; f < kTensorLeft; ++f) sum[f] = Sums{};
    if (needs_x_sum()) x_sum = Sums{};
    zeros = weight.template zeros_of_columns<format>(index, k, n);
    if (has_scaled_codes()) {
      scales = float4(1.0f);
      MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
        if (has_global_scale) scales[c] = weight.global_scale[global_scale_per_column ? min(n + c, weight.N - 1) : 0];
      }
    } else {
      scales = weight.template scales_of_columns<format>(index, k, n);
    }
    if (has_small_codes()) {
      scales *= 1.0f / kSmallCode;
      if (zeros_role(format) == ZerosRole::zero_point && needs_x_sum()) zeros *= kSmallCode;
    }
  }

  // Multiplies the next step() k from k0 on. Both operands are zero at k_end and beyond.
  MARLIN_INLINE void multiply(uint k0, uint k_end) thread {
    const uint k_lane = k0 + quad * (takes_half_words() ? 4 : kBlockK);
    const bool has_k = !ragged_k || k_lane < k_end;
    uint4 packed[words_per_block(format)];
    float4 code_scales = float4(0.0f);
    MARLIN_UNROLL for (uint i = 0; i < words_per_block(format); ++i) {
      packed[i] = uint4(0);
      if (!has_k || (takes_half_words() && i == 1)) continue;
      packed[i] = load_columns(weight.packed + ulong(k_lane / codes_per_word(format) + i) * weight.N + n, weight.N - n);
    }
    uint4 high = uint4(0);
    if (has_high_plane(format) && has_k) {
      high = load_columns(weight.high + weight.template high_index<format>(k_lane) + n, weight.N - n) >>
             high_shift_of<format>(k_lane);
    }
    if (has_k) {
      if (has_scaled_codes()) code_scales = scales_in_codes(k_lane);
    }
    Vec8<T> codes[4];
    MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
      BlockWords<format> words;
      MARLIN_UNROLL for (uint i = 0; i < words_per_block(format); ++i) words.word[i] = packed[i][c];
      words.high = high[c];
      codes[c] = decoded(words, half(zeros[c]), half(code_scales[c]));
    }
    MARLIN_UNROLL for (uint j = 0; j < 2; ++j) {
      if (takes_half_words() && j == 1) continue;
      TensorElements<T, 16> x;
      MARLIN_UNROLL for (uint t = 0; t < kTensorQuads; ++t) {
        vec<T, 4> loaded = vec<T, 4>(T(0.0f));
        if (has_k) loaded = a.load_quad(x_row[t] + (has_perm ? 0 : k_lane + 4 * j), k_lane + 4 * j);
        MARLIN_UNROLL for (uint i = 0; i < 4; ++i) x.e[4 * t + i] = loaded[i];
      }
      MARLIN_UNROLL for (uint f = 0; f < kTensorLeft; ++f) {
        TensorElements<T, 8> w;
        MARLIN_UNROLL for (uint i = 0; i < 8; ++i) w.e[i] = has_k ? codes[2 * f + i / 4].k[4 * j + i % 4] : T(0.0f);
        tensor_multiply(w, x, sum[f]);
      }
      if (needs_x_sum()) {
        TensorElements<T, 8> ones;
        MARLIN_UNROLL for (uint i = 0; i < 8; ++i) ones.e[i] = T(1.0f);
        tensor_multiply(ones, x, x_sum);
      }
    }
  }

  // Scales the sums and adds them to the totals.
  MARLIN_INLINE void finish_chain() thread {
    MARLIN_UNROLL for (uint f = 0; f < kTensorLeft; ++f) {
      MARLIN_UNROLL for (uint i = 0; i < 16; ++i) {
        const uint c = 2 * f + i % 8 / 4;
        total[f].e[i] +=
            needs_x_sum() ? apply_group<format>(sum[f].e[i], x_sum.e[i], scales[c], zeros[c]) : sum[f].e[i] * scales[c];
      }
    }
  }

 private:
  MARLIN_INLINE float4 scales_in_codes(uint k) const thread {
    const uchar4 bytes = load_columns(weight.scales + (k / kMinGroupSize * weight.N + n), weight.N - n);
    return e4m3_products(bytes, float4(1.0f));
  }

  // Decodes a block. If takes_half_words(), decodes only the lane's half of the block, to k[0..3].
  MARLIN_INLINE Vec8<T> decoded(BlockWords<format> words, half zero, half scale) const thread {
    Vec8<T> result;
    const bool splits_word = takes_half_words() && words_per_block(format) == 1;
    if (splits_word) {
      // exact_codes() decodes nibbles i and i + 4 together, so two of the four nibbles are moved to the upper half.
      const uint own = quad % 2 == 0 ? words.word[0] : words.word[0] >> 16;
      words.word[0] = (own & 0xFFu) | (own & 0xFF00u) << 8;
      if (has_high_plane(format)) {
        const uint bits = high_bits(format);
        const uint fields = ((1u << bits) - 1) * ((1u << high_field(bits, 0)) | (1u << high_field(bits, 1)));
        const uint own_high = words.high >> (quad % 2 * 16);
        words.high = (own_high & fields) | ((own_high >> high_field(bits, 2)) & fields) << 16;
      }
    }
    const half zero_in_code = zero_is_in_code<format>() ? zero : 0.0h;
    const Vec8<half> codes =
        has_small_codes() ? small_codes<format>(words, zero_in_code) : exact_codes<format>(words, zero_in_code);
    MARLIN_UNROLL for (uint i = 0; i < kBlockK; ++i) {
      result.k[i] = T(float(has_scaled_codes() ? codes.k[i] * scale : codes.k[i]));
    }
    if (splits_word) {
      result.k[2] = result.k[4];
      result.k[3] = result.k[5];
    }
    return result;
  }
};

// The rows of a product from `begin` on. A row at M or beyond reads row M - 1, and its result is not stored.
struct ProductRows {
  uint M;
  uint begin;

  // Returns true if `row`, counted from `begin`, is a row of the product.
  MARLIN_INLINE bool has(uint row) const thread { return begin + row < M; }
  template <typename T>
  MARLIN_INLINE const device T* start(const thread Activations<T>& a, uint row) const thread {
    return a.row_at(min(begin + row, M - 1));
  }
  // Sets m to the output row of `row`. Returns false if the row is not stored.
  MARLIN_INLINE bool stores(uint row, thread uint& m) const thread {
    m = begin + row;
    return m < M;
  }
};

// The common body of the kernels: multiplies the threadgroup's rows and columns over split block.z of K.
template <WeightFormat format, typename T, typename Rows>
MARLIN_INLINE void tensor_rows(const thread Product<T>& product, const thread Rows& rows, constant GemmParams& params,
                               uint3 block, uint lane, uint simdgroup, uint simdgroups) {
  const uint down = uint(rows_per_threadgroup) / kTensorRows;
  const uint across = simdgroups / down;
  const uint first_row = simdgroup / across * kTensorRows;
  const uint first_column = (block.x * across + simdgroup % across) * kTensorColumns;
  const uint N = params.N;
  const uint group_size = params.group_size;
  if (!rows.has(first_row) || first_column >= N) return;
  const LanePlace place = tensor_place(lane);
  const uint n = first_column + place.row * 4;
  const uint k_begin = block.z * params.k_per_slice;
  const uint k_end = min(k_begin + params.k_per_slice, params.K);

  TensorAccumulators<format, T> sums;
  sums.weight = product.weight;
  sums.a = product.a;
  sums.n = min(n, N);  // columns at N and beyond load zero and are not stored
  sums.quad = place.column / 4;
  MARLIN_UNROLL for (uint t = 0; t < kTensorQuads; ++t) {
    sums.x_row[t] = rows.start(product.a, first_row + place.row + 8 * t);
  }
  MARLIN_UNROLL for (uint f = 0; f < kTensorLeft; ++f) sums.total[f] = TensorElements<float, 16>{};
  for (uint k = k_begin; k < k_end;) {
    const uint end = sums.chain_end(k, group_size, k_end);
    sums.begin_chain(k);
    for (; k < end; k += sums.step())
      sums.multiply(k, k_end);
    sums.finish_chain();
  }

  MARLIN_UNROLL for (uint i = 0; i < 8; ++i) {
    const uint row = first_row + place.column + i % 4 + i / 4 * 16;
    const uint e = i % 4 + i / 4 * 8;
    uint m = 0;
    if (n >= N || !rows.stores(row, m)) continue;
    const float4 columns =
        float4(sums.total[0].e[e], sums.total[0].e[e + 4], sums.total[1].e[e], sums.total[1].e[e + 4]);
    product.output.store_columns(block.z, m, n, columns);
  }
}

}  // namespace marlin
