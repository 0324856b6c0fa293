// The sm_* functions that compiled kernels call.
#include <cstring>

#include "checker/checker.h"
#include "machine.h"
#include "report.h"

namespace softmetal {
namespace {

// Waits until all matrix products of this lane have been computed.
void finish_products(Lane& lane, const void* site) {
  Simdgroup& simdgroup = *lane.simdgroup;
  while (simdgroup.matrices.done() < lane.products) {
    Machine& machine = machine_of(lane);
    if (simdgroup.matrices.complete() >= lane.products) {
      machine.counters.mmas += simdgroup.matrices.compute(simdgroup.lanes);
      machine.wake_matrix_lanes(simdgroup);
    } else {
      machine.wait(lane, State::kMatrix, site);
    }
  }
}

}  // namespace
}  // namespace softmetal

using softmetal::Lane;
using softmetal::Machine;
using softmetal::machine_of;
using softmetal::Simdgroup;
using softmetal::State;

extern "C" {

void sm_threadgroup_barrier(uint32_t mem_flags) {
  Lane& lane = Machine::current();
  lane.mem_flags = mem_flags;
  machine_of(lane).wait(lane, State::kBarrier, __builtin_return_address(0));
}

void sm_simdgroup_barrier(uint32_t mem_flags) {
  Lane& lane = Machine::current();
  lane.mem_flags = mem_flags;
  machine_of(lane).wait(lane, State::kSimdBarrier, __builtin_return_address(0));
}

uint32_t sm_simd_exchange(const void* value, uint32_t bytes, const void** slots) {
  Lane& lane = Machine::current();
  std::memcpy(lane.deposit, value, bytes);
  lane.deposit_bytes = bytes;
  machine_of(lane).wait(lane, State::kExchange, __builtin_return_address(0));
  *slots = lane.simdgroup->slots;
  return lane.simdgroup->active;
}

void sm_report_inactive_lane(uint32_t other) {
  Lane& lane = Machine::current();
  if (machine_of(lane).launch().checker == nullptr) return;
  softmetal::Fault fault{SM_FAULT_INACTIVE_LANE, false, lane.site, ""};  // the site of the preceding exchange
  fault.text = "value of lane " + std::to_string(other) + ", which takes no part in this simd operation";
  softmetal::report(lane, fault);
}

void sm_mma(void* d, uint32_t d_type, const void* a, uint32_t a_type, const void* b, uint32_t b_type, const void* c,
            uint32_t c_type) {
  Lane& lane = Machine::current();
  Simdgroup& simdgroup = *lane.simdgroup;
  const void* site = __builtin_return_address(0);
  auto& queue = simdgroup.matrices;
  while (!queue.has_room(lane)) {
    if (queue.done() < lane.products) {
      softmetal::finish_products(lane, site);
    } else {
      machine_of(lane).wait(lane, State::kMatrix, site);
    }
  }
  if (const void* other = queue.deposit(lane, site, d, d_type, {a, a_type}, {b, b_type}, {c, c_type}); other != site) {
    softmetal::Fault fault{SM_FAULT_SIMD, true, site, "simdgroup matrix operation at different calls in one simdgroup"};
    fault.other_code = other;
    softmetal::report(lane, fault);
  }
  if (machine_of(lane).launch().checker != nullptr) softmetal::finish_products(lane, site);
}

void sm_mma_sync(void) {
  Lane& lane = Machine::current();
  softmetal::finish_products(lane, __builtin_return_address(0));
}

void sm_mma_sync_if(const void* d) {
  Lane& lane = Machine::current();
  if (lane.simdgroup->matrices.is_pending(lane, d)) softmetal::finish_products(lane, __builtin_return_address(0));
}

void* sm_threadgroup_variable(uint32_t site, uint32_t, uint32_t) {
  return Machine::current().simdgroup->group->variables[site];
}

float sm_perturb(float x, float ulps) {
  if (sm_self == nullptr) return x;  // outside GPU threads, while the library is loaded
  uint64_t seed = machine_of(Machine::current()).launch().dispatch->perturb_seed;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t magnitude = bits & 0x7FFFFFFF;
  // Zero, subnormals, infinities and NaN are not perturbed, nor are results close to zero or infinity.
  if (seed == 0 || ulps < 1.0f || magnitude < 0x00800100 || magnitude > 0x7F7FFF00) return x;
  auto reach = static_cast<int32_t>(ulps);
  uint64_t hash = softmetal::mix(seed ^ (static_cast<uint64_t>(bits) << 8) ^ static_cast<uint64_t>(reach));
  bits += static_cast<uint32_t>(static_cast<int32_t>(hash % (2 * static_cast<uint64_t>(reach) + 1)) - reach);
  std::memcpy(&x, &bits, 4);
  return x;
}

void sm_note_atomic(const volatile void* address, uint32_t bytes, int operation) {
  Lane& lane = Machine::current();
  Machine& machine = machine_of(lane);
  ++machine.counters.atomics;
  if (softmetal::Checker* checker = machine.launch().checker) {
    using Kind = softmetal::Checker::Kind;
    checker->access(const_cast<const void*>(address), bytes, operation != SM_ATOMIC_LOAD,
                    operation == SM_ATOMIC_UPDATE ? Kind::kAtomicUpdate : Kind::kAtomic, __builtin_return_address(0));
  }
}

void sm_note_matrix_access(void) {
  Lane& lane = Machine::current();
  Simdgroup& simdgroup = *lane.simdgroup;
  const void* site = __builtin_return_address(0);
  uint32_t number = lane.matrix_accesses++;
  const void*& known = simdgroup.matrix_sites[number % 64];
  if (number == simdgroup.matrix_accesses) {
    ++simdgroup.matrix_accesses;
    known = site;
  } else if (simdgroup.matrix_accesses - number <= 64 && known != site) {
    softmetal::Fault fault{SM_FAULT_SIMD, true, site,
                           "simdgroup matrix load or store at different calls in one simdgroup"};
    fault.other_code = known;
    softmetal::report(lane, fault);
  }
}

void sm_undefined_function_constant(const char* name) {
  if (sm_self == nullptr) return;  // outside GPU threads, while the library is loaded
  Lane& lane = Machine::current();
  softmetal::Fault fault{SM_FAULT_CONSTANT_VALUE, true, __builtin_return_address(0), ""};
  fault.text = std::string("function constant '") + name + "' has no value in this specialisation";
  softmetal::report(lane, fault);
}

}  // extern "C"
