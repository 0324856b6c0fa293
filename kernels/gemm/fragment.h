// The 8x8 operands of the matrix unit, and the elements of an operand that each lane holds. Operands are loaded from
// contiguous 8x8 blocks of threadgroup memory, so they need no padding to avoid bank conflicts.
#pragma once

#include "kernels/gemm/decode.h"

namespace marlin {

enum { kBlockElements = kBlock * kBlock };

// A lane holds the elements (row, column) and (row, column + 1). Apple documents the number of elements per lane, but
// not their positions. Mesa, applegpu and the output of Apple's compiler agree on these positions for every GPU from M1
// on.
struct LanePlace {
  uint row;
  uint column;
};

MARLIN_INLINE LanePlace lane_place(uint lane) {
  return {4 * (lane >> 4) + ((lane >> 1) & 3u), 4 * ((lane >> 3) & 1u) + 2 * (lane & 1u)};
}

// Operands keep their element type, except bfloat, which is converted to float, because M1 and M2 have no bfloat unit.
template <typename T>
struct ActivationFragment {
  typedef simdgroup_matrix<T, kBlock, kBlock> Matrix;

  static MARLIN_INLINE Matrix load(const threadgroup T* block, uint) {
    Matrix matrix;
    simdgroup_load(matrix, block, kBlock);
    return matrix;
  }
};

template <>
struct ActivationFragment<bfloat> {
  typedef simdgroup_matrix<float, kBlock, kBlock> Matrix;

  static MARLIN_INLINE Matrix load(const threadgroup bfloat* block, uint lane) {
    const LanePlace place = lane_place(lane);
    const threadgroup bfloat* source = block + place.row * kBlock + place.column;
    Matrix matrix;
    matrix.thread_elements()[0] = float(source[0]);
    matrix.thread_elements()[1] = float(source[1]);
    return matrix;
  }
};

template <CodeKind kind>
struct CodeFragment {
  typedef simdgroup_matrix<half, kBlock, kBlock> Matrix;

  static MARLIN_INLINE Matrix load(const threadgroup half* block, uint, const threadgroup float*) {
    Matrix matrix;
    simdgroup_load(matrix, block, kBlock);
    return matrix;
  }
};

template <>
struct CodeFragment<CodeKind::table> {
  typedef simdgroup_matrix<float, kBlock, kBlock> Matrix;

  static MARLIN_INLINE Matrix load(const threadgroup half* block, uint lane, const threadgroup float* table) {
    const LanePlace place = lane_place(lane);
    const threadgroup half* source = block + place.row * kBlock + place.column;
    Matrix matrix;
    matrix.thread_elements()[0] = table[uint(source[0])];
    matrix.thread_elements()[1] = table[uint(source[1])];
    return matrix;
  }
};

}  // namespace marlin
