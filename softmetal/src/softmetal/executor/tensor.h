// The products of Metal 4's tensor units. Kernels get their declarations by including the
// headers of msl/tensor. They are not declared in abi.h, because every compiled kernel depends on that file.
#pragma once

#include <cstdint>

namespace softmetal {

// The operands of the latest product of a simdgroup, as rows of a (16 x k) and rows of b (k x 16).
struct TensorOperands {
  uint64_t number = 0;  // number of the product, counted from 1
  alignas(32) float a[256], b[256];
};

}  // namespace softmetal

extern "C" {

// A matrix is cut into blocks of 16 x 16. A lane holds 8 elements of a block, in row
// ((lane >> 2) & 4) | ((lane >> 1) & 3) and in the row 8 below. Elements 4 to 7 are in the lower row. Which columns
// they have depends on the layout; with c = ((lane >> 2) & 2) | (lane & 1):
enum {
  SM_TENSOR_SEEDED = 0,   // as SM_TENSOR_QUADS, but the launch's seed exchanges lanes, elements and blocks
  SM_TENSOR_QUADS = 1,    // four neighbours from column 4 c
  SM_TENSOR_PAIRS = 2,    // two neighbours from column 2 c, and two from column 2 c + 8
  SM_TENSOR_FOREIGN = 3,  // another fixed layout, which no known GPU has
};

// Returns 16 * row + column of an element of the calling lane, 0 <= element < 8.
uint32_t sm_tensor_place(uint32_t element, uint32_t layout);

// Returns which block of a matrix the calling simdgroup holds; `index` counts the simdgroup's own blocks from 0. The
// matrix has `blocks` blocks and is spread over `groups` simdgroups. A result >= blocks means that the simdgroup has no
// such block.
uint32_t sm_tensor_block(uint32_t index, uint32_t groups, uint32_t blocks, uint32_t layout);

enum {
  SM_TENSOR_TRANSPOSE_A = 1,
  SM_TENSOR_TRANSPOSE_B = 2,
  SM_TENSOR_RELAXED = 4,   // the operands are float, and the unit may round them
  SM_TENSOR_LAYOUT_A = 3,  // the bit from which on the operand's layout stands, in two bits
  SM_TENSOR_LAYOUT_B = 5,
  SM_TENSOR_LAYOUT_SUM = 7,
};

// Adds the product of two blocks to `sum`. Each argument holds the calling lane's 8 elements of a block. All lanes of
// the simdgroup must reach the call. Without a seed, a sum is fp32 and adds its 16 products in the order of k, each by
// one fma. A seed chooses another order, and for SM_TENSOR_RELAXED also operands of 11 significant bits.
void sm_tensor_product(const float* a, const float* b, float* sum, uint32_t options);

}  // extern "C"
