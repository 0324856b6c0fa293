#include "tensor.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "machine.h"
#include "report.h"

namespace softmetal {
namespace {

constexpr uint64_t kForeign = 5 | 1 << 5;  // exchanges lanes and elements of SM_TENSOR_FOREIGN

// Returns the seed of the choices that Apple does not document. 0 means the simplest choices. If the launch has no
// seed, as in fast mode under PyTorch, the environment variable SOFTMETAL_VARY supplies one.
uint64_t seed_of(Lane& lane) {
  static const char* const vary = std::getenv("SOFTMETAL_VARY");
  static const uint64_t everywhere = vary != nullptr && *vary != 0 ? std::strtoull(vary, nullptr, 10) + 1 : 0;
  const uint64_t launch = machine_of(lane).launch().dispatch->perturb_seed;
  const uint64_t seed = launch != 0 ? launch : everywhere;
  return seed == 0 ? 0 : mix(seed);
}

// Returns 16 * row + column of an element of a block.
uint32_t place_of(uint32_t layout, uint64_t seed, uint32_t lane, uint32_t element) {
  if (layout == SM_TENSOR_SEEDED || layout == SM_TENSOR_FOREIGN) {
    const uint64_t exchanges = layout == SM_TENSOR_FOREIGN ? kForeign : seed;
    lane ^= exchanges & 31;
    element ^= exchanges >> 5 & 7;
  }
  const uint32_t row = (((lane >> 2) & 4) | ((lane >> 1) & 3)) + 8 * (element >> 2);
  const uint32_t unit = ((lane >> 2) & 2) | (lane & 1);
  const uint32_t column =
      layout == SM_TENSOR_PAIRS ? 2 * unit + (element & 1) + 8 * (element >> 1 & 1) : 4 * unit + (element & 3);
  return 16 * row + column;
}

uint32_t layout_in(uint32_t options, uint32_t shift) {
  return options >> shift & 3;
}

// Rounds to 11 significant bits, to nearest.
float round_operand(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7F800000) == 0x7F800000) return x;
  bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Collects the operands of all lanes. Only the first lane that continues after the exchange calls this.
void collect(const Simdgroup& simdgroup, TensorOperands& all, uint64_t seed, uint32_t options) {
  const uint32_t layout_a = layout_in(options, SM_TENSOR_LAYOUT_A), layout_b = layout_in(options, SM_TENSOR_LAYOUT_B);
  const bool rounds = (options & SM_TENSOR_RELAXED) != 0 && (seed >> 10 & 1) != 0;
  for (uint32_t lane = 0; lane < SM_SIMD_WIDTH; ++lane) {
    float values[16];
    std::memcpy(values, simdgroup.slots + 64 * lane, 64);
    for (uint32_t i = 0; i < 8; ++i) {
      uint32_t a = place_of(layout_a, seed, lane, i), b = place_of(layout_b, seed, lane, i);
      if ((options & SM_TENSOR_TRANSPOSE_A) != 0) a = 16 * (a & 15) + (a >> 4);
      if ((options & SM_TENSOR_TRANSPOSE_B) != 0) b = 16 * (b & 15) + (b >> 4);
      all.a[a] = rounds ? round_operand(values[i]) : values[i];
      all.b[b] = rounds ? round_operand(values[8 + i]) : values[8 + i];
    }
  }
}

// Adds 16 products to a sum, in the order that the seed chooses.
float added(float sum, const float* a, const float* b, uint32_t order) {
  if (order == 0) {
    for (int k = 0; k < 16; ++k)
      sum = std::fma(a[k], b[16 * k], sum);
  } else if (order == 1) {
    for (int k = 15; k >= 0; --k)
      sum = std::fma(a[k], b[16 * k], sum);
  } else if (order == 2) {  // adds the products first, and then their sum
    float part = 0;
    for (int k = 0; k < 16; ++k)
      part = std::fma(a[k], b[16 * k], part);
    sum += part;
  } else {  // adds four products at a time, in pairs
    for (int k = 0; k < 16; k += 4) {
      float pairs[2];
      for (int i = 0; i < 2; ++i)
        pairs[i] = std::fma(a[k + 2 * i], b[16 * (k + 2 * i)], a[k + 2 * i + 1] * b[16 * (k + 2 * i + 1)]);
      sum += pairs[0] + pairs[1];
    }
  }
  return sum;
}

}  // namespace
}  // namespace softmetal

using softmetal::Lane;
using softmetal::Machine;
using softmetal::machine_of;
using softmetal::Simdgroup;

extern "C" {

uint32_t sm_tensor_place(uint32_t element, uint32_t layout) {
  Lane& lane = Machine::current();
  return softmetal::place_of(layout, softmetal::seed_of(lane), lane.self.thread_index_in_simdgroup, element);
}

uint32_t sm_tensor_block(uint32_t index, uint32_t groups, uint32_t blocks, uint32_t layout) {
  Lane& lane = Machine::current();
  const uint32_t block = lane.self.simdgroup_index_in_threadgroup % groups + groups * index;
  const bool is_reversed = layout == SM_TENSOR_SEEDED && (softmetal::seed_of(lane) >> 11 & 1) != 0;
  return is_reversed && block < blocks ? blocks - 1 - block : block;
}

void sm_tensor_product(const float* a, const float* b, float* sum, uint32_t options) {
  Lane& lane = Machine::current();
  Simdgroup& simdgroup = *lane.simdgroup;
  Machine& machine = machine_of(lane);
  const void* site = __builtin_return_address(0);
  std::memcpy(lane.deposit, a, 32);
  std::memcpy(lane.deposit + 32, b, 32);
  lane.deposit_bytes = 64;
  machine.wait(lane, softmetal::State::kExchange, site);
  if (simdgroup.active != 0xFFFFFFFF) {
    softmetal::Fault fault{SM_FAULT_SIMD, true, site, "matmul2d: only some threads of the simdgroup reach the call"};
    softmetal::report(lane, fault);
  }
  const uint64_t seed = softmetal::seed_of(lane);
  softmetal::TensorOperands& all = simdgroup.tensor;
  if (++lane.tensor_products != all.number) {
    all.number = lane.tensor_products;
    softmetal::collect(simdgroup, all, seed, options);
    ++machine.counters.mmas;
  }
  const uint32_t layout = softmetal::layout_in(options, SM_TENSOR_LAYOUT_SUM);
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t at = softmetal::place_of(layout, seed, lane.self.thread_index_in_simdgroup, i);
    sum[i] = softmetal::added(sum[i], all.a + (at & ~15u), all.b + (at & 15), static_cast<uint32_t>(seed >> 8 & 3));
  }
}

}  // extern "C"
