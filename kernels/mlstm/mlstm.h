// Common parts of the mLSTM kernels: fragments, functions of the gates, and loads that handle the ends of tensors.
//
// Matrices are multiplied as fp32 fragments, which are built in registers directly from device memory. A fragment may
// have its k in any order if both operands have the same order. Here a lane's elements are adjacent in memory: of 32
// rows, row r of fragment b is row 4 r + b; of 32 columns, column 2 p + e of fragment b is column 8 p + 2 b + e.
#pragma once

#include "kernels/gemm/fragment.h"
#include "kernels/mlstm/params.h"

namespace marlin {

typedef simdgroup_matrix<float, kBlock, kBlock> Fragment;

enum { kFragments = 4 };  // fragments that cover 32 rows or columns

// Loads of four and eight adjacent elements. Offsets have 32 bits and the base is the same for all lanes, so a load is
// one instruction. If is_vector, the address is aligned to four elements and `limit` is a multiple of four.
//
// A Tail defines the result for elements at `limit` and beyond. Tail::zero loads zero. Tail::clamp loads any element
// below `limit`, which is sufficient for rows and columns whose results are not stored.
enum class Tail { clamp, zero };

template <Tail tail, typename T>
MARLIN_INLINE vec<T, 4> load4(const device T* data, uint row, uint first, uint limit, bool is_vector) {
  vec<T, 4> x = vec<T, 4>(T(0.0f));
  if (is_vector) {
    const uint column = tail == Tail::clamp ? min(first, limit - 4) : first;
    if (tail == Tail::clamp || first < limit) x = *reinterpret_cast<const device vec<T, 4>*>(data + (row + column));
  } else {
    MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
      const uint column = tail == Tail::clamp ? min(first + i, limit - 1) : first + i;
      if (tail == Tail::clamp || first + i < limit) x[i] = data[row + column];
    }
  }
  return x;
}

template <typename T>
MARLIN_INLINE void store4(device T* data, uint row, uint first, uint limit, bool is_vector, float4 x) {
  if (is_vector) {
    vec<T, 4> rounded;
    MARLIN_UNROLL for (uint i = 0; i < 4; ++i) rounded[i] = T(x[i]);
    if (first < limit) *reinterpret_cast<device vec<T, 4>*>(data + (row + first)) = rounded;
  } else {
    MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
      if (first + i < limit) data[row + first + i] = T(x[i]);
    }
  }
}

// Eight adjacent columns of a lane, out of 32.
template <typename T>
struct LaneColumns {
  vec<T, 4> x[2];

  // Columns are clamped to `limit`. The row is zero if `exists` is false.
  template <Tail tail>
  MARLIN_INLINE void load(const device T* data, uint row, uint first, uint limit, bool exists, bool is_vector) thread {
    MARLIN_UNROLL for (uint i = 0; i < 2; ++i) {
      x[i] = vec<T, 4>(T(0.0f));
      if (tail == Tail::clamp || exists) x[i] = load4<Tail::clamp>(data, row, first + 4 * i, limit, is_vector);
    }
  }
  MARLIN_INLINE float at(uint column) const thread { return float(x[column / 4][column % 4]); }
  // Replaces non-finite values by 0. Returns true if all values were finite.
  MARLIN_INLINE bool clear_not_finite() thread {
    bool was_finite = true;
    MARLIN_UNROLL for (uint i = 0; i < 8; ++i) {
      const bool is_finite = isfinite(at(i));
      if (!is_finite) x[i / 4][i % 4] = T(0.0f);
      was_finite = was_finite && is_finite;
    }
    return was_finite;
  }
  MARLIN_INLINE Fragment operand(uint b) const thread {
    Fragment matrix;
    matrix.thread_elements()[0] = at(2 * b);
    matrix.thread_elements()[1] = at(2 * b + 1);
    return matrix;
  }
};

// A lane's elements of a fragment: columns 2 * pair and 2 * pair + 1 of row `row`.
struct MlstmLane {
  uint row;
  uint pair;
};

MARLIN_INLINE MlstmLane mlstm_lane(uint lane) {
  const LanePlace place = lane_place(lane);
  return {place.row, place.column / 2};
}

// Returns the lane that holds (row, 2 * pair): the inverse of lane_place.
MARLIN_INLINE ushort mlstm_lane_at(uint row, uint pair) {
  return ushort((row >> 2) << 4 | (pair >> 1) << 3 | (row & 3u) << 1 | (pair & 1u));
}

// Returns the sum over the four lanes that share a row.
MARLIN_INLINE float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

template <typename T>
MARLIN_INLINE const device T* first_token(const device T* data, constant MlstmStrides& strides,
                                          constant MlstmParams& params, uint head) {
  return data + int64_t(head / params.heads_per_batch) * strides.batch +
         int64_t(head % params.heads_per_batch) * strides.head;
}

// One head's gate vectors in the buffer of kSlotGates. The host limits the size of that buffer to 32-bit offsets.
template <typename Pointer>
struct GateVectors {
  Pointer data;
  uint stride;  // between vectors
  uint first;

  MARLIN_INLINE uint index(GateVector vector, uint token) const thread { return vector * stride + first + token; }
  MARLIN_INLINE float at(GateVector vector, uint token) const thread { return data[index(vector, token)]; }
};

// Returns a head's gate vectors. Token 0 of the result is token `start` of the sequence.
template <typename Pointer>
MARLIN_INLINE GateVectors<Pointer> gate_vectors(Pointer gates, constant MlstmParams& params, uint head, uint start) {
  return {gates, params.heads * params.gate_stride, head * params.gate_stride + start};
}

MARLIN_INLINE uint chunk_index(constant MlstmParams& params, ChunkVector vector, uint head) {
  return (vector * params.heads + head) * params.chunks;
}

// Returns log(sigmoid(f)) = min(f, 0) - log1p(e), where e = exp(-|f|). Metal has no log1p, so log(1 + e) is multiplied
// by e / ((1 + e) - 1), which corrects the rounding of 1 + e. The form -log(1 + exp(-f)) would be minus infinity below
// f = -88.
MARLIN_INLINE float log_sigmoid(float f) {
  const float e = exp(-abs(f));
  const float u = 1.0f + e;
  return min(f, 0.0f) - (u == 1.0f ? e : log(u) * (e / (u - 1.0f)));
}

}  // namespace marlin
