// Queues the matrix products of a simdgroup until a result is read, so that the lanes meet once for many products.
#pragma once

#include <cstdint>

namespace softmetal {

struct Lane;

// Returns the row-major index of the first of a lane's two elements in an 8x8 matrix.
constexpr uint32_t matrix_place(uint32_t lane) {
  uint32_t row = 4 * (lane >> 4) + ((lane >> 1) & 3);
  uint32_t pair = 2 * ((lane >> 3) & 1) + (lane & 1);
  return row * 8 + pair * 2;
}

struct MatrixOperand {
  const void* elements;  // the lane's two elements
  uint32_t type;         // 0 half, 1 bfloat, 2 float
};

// The deferred matrix products of a simdgroup, numbered from 0. results_ holds the values of the matrices to which
// pending products write. Once all deposited products are computed, these values are written to the lanes' memory.
class MatrixQueue {
 public:
  static constexpr uint32_t kCapacity = 64;

  void reset() { first_ = complete_ = deposited_ = result_count_ = 0; }

  // Returns whether the lane may deposit another product now. If not, the lane must wait until done() reaches the
  // number of products that the lane has deposited.
  bool has_room(const Lane& lane) const;
  // Stores a lane's operands. The product is complete when all 32 lanes have stored operands. Returns the call site of
  // the first lane.
  const void* deposit(Lane& lane, const void* site, void* d, uint32_t d_type, MatrixOperand a, MatrixOperand b,
                      MatrixOperand c);
  // Returns whether d is the destination of a product that has not been computed.
  bool is_pending(const Lane& lane, const void* d) const;
  // Computes all complete products and writes the results to the memory of all lanes.
  uint64_t compute(Lane* lanes);

  uint64_t complete() const { return complete_; }
  uint64_t done() const { return first_; }

 private:
  struct Product {
    const void* site;
    uint32_t arrived;
    uint32_t result;
    int32_t addend;  // index of the pending result that c refers to; -1: the lanes have copied c into `result`
    alignas(32) float a[64], b[64];
  };
  struct Result {
    uint32_t type;
    void* destination[32];
    alignas(32) float value[64];
  };
  int32_t find(const Lane& lane, const void* d) const;

  uint64_t first_ = 0, complete_ = 0, deposited_ = 0;
  uint32_t result_count_ = 0;
  Product products_[kCapacity];
  Result results_[kCapacity];
};

}  // namespace softmetal
