// The products of Metal 4's tensor units. Kernels that include the headers of msl/tensor get these declarations from
// there. They are not in abi.h, because every compiled kernel depends on that file and would be compiled again after
// each change.
#pragma once

#include <cstdint>

namespace softmetal {

// The operands of the latest product of a simdgroup, both row by row: a is 16 x k, and b is k x 16.
struct TensorOperands {
  uint64_t number = 0;  // number of the product, counted from 1
  alignas(32) float a[256], b[256];
};

}  // namespace softmetal

extern "C" {

// A matrix is divided into blocks of 16 x 16. A lane holds 8 elements of a block: four in row
// ((lane >> 2) & 4) | ((lane >> 1) & 3), and four in the row 8 below. The layout determines the columns of the four.
// c is ((lane >> 2) & 2) | (lane & 1).
enum {
  SM_TENSOR_SEEDED = 0,   // like SM_TENSOR_QUADS, but the launch's seed permutes lanes, elements and blocks
  SM_TENSOR_QUADS = 1,    // four neighbours from column 4 c
  SM_TENSOR_PAIRS = 2,    // two neighbors from column 2 c on, and two from column 2 c + 8 on
  SM_TENSOR_FOREIGN = 3,  // another fixed layout, which no known GPU has
};

// Returns 16 * row + column of an element of the calling lane, 0 <= element < 8.
uint32_t sm_tensor_place(uint32_t element, uint32_t layout);

// Returns the block of a matrix that the calling simdgroup holds at `index`, which counts the simdgroup's own blocks
// from 0. The matrix has `blocks` blocks and is spread over `groups` simdgroups. A result >= blocks means that the
// simdgroup has no such block.
uint32_t sm_tensor_block(uint32_t index, uint32_t groups, uint32_t blocks, uint32_t layout);

enum {
  SM_TENSOR_TRANSPOSE_A = 1,
  SM_TENSOR_TRANSPOSE_B = 2,
  SM_TENSOR_RELAXED = 4,   // the operands are float, and the unit may round them
  SM_TENSOR_LAYOUT_A = 3,  // position of the two bits that store the operand's layout
  SM_TENSOR_LAYOUT_B = 5,
  SM_TENSOR_LAYOUT_SUM = 7,
};

// Adds the product of two blocks to `sum`. Each argument holds the calling lane's 8 elements of a block. All lanes of
// the simdgroup must reach the call.
//
// The sum is fp32. Without a seed, it adds the 16 products in the order of k, each by one fma. A seed chooses another
// order and, for SM_TENSOR_RELAXED, may round the operands to 11 significant bits.
void sm_tensor_product(const float* a, const float* b, float* sum, uint32_t options);

}  // extern "C"
