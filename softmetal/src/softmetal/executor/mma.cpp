#include "mma.h"

#include <immintrin.h>

#include <cstring>

#include "machine.h"

namespace softmetal {
namespace {

enum { kHalf = 0, kBfloat = 1, kFloat = 2 };

void widen(MatrixOperand operand, float* out) {
  if (operand.type == kFloat) {
    std::memcpy(out, operand.elements, 8);
  } else if (operand.type == kHalf) {
    _Float16 h[2];
    std::memcpy(h, operand.elements, 4);
    out[0] = static_cast<float>(h[0]);
    out[1] = static_cast<float>(h[1]);
  } else {
    uint16_t h[2];
    std::memcpy(h, operand.elements, 4);
    uint32_t bits[2] = {static_cast<uint32_t>(h[0]) << 16, static_cast<uint32_t>(h[1]) << 16};
    std::memcpy(out, bits, 8);
  }
}

// Rounds to nearest, ties to even. NaN stays NaN.
uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void narrow(const float* value, uint32_t type, void* out) {
  if (type == kFloat) {
    std::memcpy(out, value, 8);
  } else if (type == kHalf) {
    _Float16 h[2] = {static_cast<_Float16>(value[0]), static_cast<_Float16>(value[1])};
    std::memcpy(out, h, 4);
  } else {
    uint16_t h[2] = {to_bfloat(value[0]), to_bfloat(value[1])};
    std::memcpy(out, h, 4);
  }
}

void round_to(float* values, uint32_t type) {
  if (type == kFloat) return;
  for (uint32_t i = 0; i < 64; i += 2) {
    uint32_t bits;
    narrow(values + i, type, &bits);
    widen({&bits, type}, values + i);
  }
}

void multiply_add(const float* a, const float* b, const float* c, float* d) {
  __m256 rows[8];
  for (int k = 0; k < 8; ++k)
    rows[k] = _mm256_loadu_ps(b + 8 * k);
  for (int i = 0; i < 8; ++i) {
    __m256 sum = _mm256_loadu_ps(c + 8 * i);
    for (int k = 0; k < 8; ++k)
      sum = _mm256_fmadd_ps(_mm256_set1_ps(a[8 * i + k]), rows[k], sum);
    _mm256_storeu_ps(d + 8 * i, sum);
  }
}

uint64_t bloom_bit(const void* d) {
  return 1ull << ((reinterpret_cast<uintptr_t>(d) >> 2) * 0x9E3779B97F4A7C15u >> 58);
}

}  // namespace

bool MatrixQueue::has_room(const Lane& lane) const {
  bool opens_a_product = lane.products == deposited_;
  return lane.products - first_ < kCapacity && (!opens_a_product || result_count_ < kCapacity);
}

int32_t MatrixQueue::find(const Lane& lane, const void* d) const {
  if ((lane.pending_matrices & bloom_bit(d)) == 0) return -1;
  for (uint32_t i = result_count_; i-- > 0;) {
    if (results_[i].destination[lane.self.thread_index_in_simdgroup] == d) return static_cast<int32_t>(i);
  }
  return -1;
}

bool MatrixQueue::is_pending(const Lane& lane, const void* d) const {
  return find(lane, d) >= 0;
}

const void* MatrixQueue::deposit(Lane& lane, const void* site, void* d, uint32_t d_type, MatrixOperand a,
                                 MatrixOperand b, MatrixOperand c) {
  uint32_t index = lane.self.thread_index_in_simdgroup;
  uint32_t place = matrix_place(index);
  Product& product = products_[lane.products % kCapacity];
  int32_t pending;
  if (lane.products == deposited_) {  // the first lane that reaches this product chooses the result for all lanes
    ++deposited_;
    product.site = site;
    product.arrived = 0;
    product.addend = pending = find(lane, c.elements);
    if (pending >= 0 && d == c.elements) {
      product.result = static_cast<uint32_t>(pending);
    } else {
      product.result = result_count_++;
      Result& fresh = results_[product.result];
      fresh.type = d_type;
      std::memset(fresh.destination, 0, sizeof fresh.destination);
    }
  } else if (product.addend >= 0 && results_[product.addend].destination[index] == c.elements &&
             (lane.pending_matrices & bloom_bit(c.elements)) != 0) {
    pending = product.addend;  // this lane's c is pending, too: its value is the addend that the first lane found
  } else {
    pending = find(lane, c.elements);
  }
  widen(a, product.a + place);
  widen(b, product.b + place);
  uint32_t source = product.addend >= 0 ? static_cast<uint32_t>(product.addend) : product.result;
  if (pending < 0) widen(c, results_[source].value + place);
  results_[product.result].destination[index] = d;
  lane.pending_matrices |= bloom_bit(d);
  ++lane.products;
  if (++product.arrived == SM_SIMD_WIDTH) complete_ = lane.products;
  return product.site;
}

uint64_t MatrixQueue::compute(Lane* lanes) {
  uint64_t count = complete_ - first_;
  bool touched[kCapacity] = {};
  for (; first_ < complete_; ++first_) {
    const Product& product = products_[first_ % kCapacity];
    Result& result = results_[product.result];
    const float* c = product.addend >= 0 ? results_[product.addend].value : result.value;
    multiply_add(product.a, product.b, c, result.value);
    round_to(result.value, result.type);
    touched[product.result] = true;
  }
  for (uint32_t r = 0; r < result_count_; ++r) {
    if (!touched[r]) continue;
    for (uint32_t lane = 0; lane < SM_SIMD_WIDTH; ++lane) {
      void* destination = results_[r].destination[lane];
      if (destination != nullptr) narrow(results_[r].value + matrix_place(lane), results_[r].type, destination);
    }
  }
  if (complete_ == deposited_) result_count_ = 0;
  for (uint32_t lane = 0; lane < SM_SIMD_WIDTH; ++lane) {
    if (lanes[lane].products == first_) lanes[lane].pending_matrices = 0;
  }
  return count;
}

}  // namespace softmetal
