#include "machine.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "checker/checker.h"
#include "report.h"

__thread const sm_thread* sm_self __attribute__((tls_model("initial-exec"))) = nullptr;

namespace softmetal {
namespace {

// FTZ and DAZ: fp32 subnormals are flushed, as on the GPU, and half subnormals are kept
constexpr unsigned kFlushSubnormals = 0x8040;
constexpr int kUnwritten = 0xFF;  // NaN in every floating type

}  // namespace

Machine::Machine(bool checked)
    : checked_(checked),
      fibres_(&fibre_main, this, SM_MAX_THREADS * (checked ? kMaxConcurrentGroups : 1)),
      threadgroup_memory_(new char[SM_MAX_THREADGROUP_BYTES + 64]) {}

Machine::~Machine() = default;

void Machine::prepare(uint32_t concurrent) {
  while (groups_.size() < concurrent) {
    auto group = std::make_unique<Group>();
    group->lanes = std::make_unique<Lane[]>(SM_MAX_THREADS);
    group->simdgroups = std::make_unique<Simdgroup[]>(kMaxSimdgroups);
    groups_.push_back(std::move(group));
  }
}

void Machine::run(Launch& launch, uint32_t concurrent) {
  unsigned mxcsr = _mm_getcsr();
  _mm_setcsr(mxcsr | kFlushSubnormals);
  launch_ = &launch;
  const TrapScope traps(*this, signal_stack_);
  counters = {};
  random_ = Random(mix(launch.dispatch->seed));
  prepare(concurrent);
  running_.clear();
  for (uint32_t i = 0; i < concurrent; ++i) {
    if (!next_group(*groups_[i])) break;
    running_.push_back(groups_[i].get());
  }
  if (Lane* first = running_.empty() ? nullptr : pick(nullptr)) go_to(*first, &main_context_);
  if (launch.stopped) fibres_.restart();
  sm_self = nullptr;
  _mm_setcsr(mxcsr);
}

bool Machine::next_group(Group& group) {
  if (launch_->stopped) return false;
  uint64_t index = launch_->next_group.fetch_add(1);
  if (index >= launch_->group_count) return false;
  set_up(group, launch_->order.empty() ? index : launch_->order[index]);
  return true;
}

void Machine::set_up(Group& group, uint64_t index) {
  const sm_dispatch& dispatch = *launch_->dispatch;
  const sm_uint3 size = dispatch.threads_per_threadgroup;
  const sm_uint3 grid = dispatch.threads_per_grid;
  const sm_uint3 groups = launch_->groups;
  sm_uint3 at = {static_cast<uint32_t>(index % groups.x), static_cast<uint32_t>(index / groups.x % groups.y),
                 static_cast<uint32_t>(index / groups.x / groups.y)};
  sm_uint3 extent = {std::min(size.x, grid.x - at.x * size.x), std::min(size.y, grid.y - at.y * size.y),
                     std::min(size.z, grid.z - at.z * size.z)};
  group.machine = this;
  group.index = index;
  group.thread_count = group.alive = extent.x * extent.y * extent.z;
  group.simdgroup_count = (group.thread_count + SM_SIMD_WIDTH - 1) / SM_SIMD_WIDTH;
  group.barriers = group.ordered[0] = group.ordered[1] = 0;
  group.busy = group.simdgroup_count == 32 ? ~0u : (1u << group.simdgroup_count) - 1;
  for (uint32_t s = 0; s < group.simdgroup_count; ++s) {
    Simdgroup& simdgroup = group.simdgroups[s];
    simdgroup.group = &group;
    simdgroup.lanes = &group.lanes[s * SM_SIMD_WIDTH];
    simdgroup.size = std::min<uint32_t>(SM_SIMD_WIDTH, group.thread_count - s * SM_SIMD_WIDTH);
    simdgroup.runnable = simdgroup.alive = simdgroup.size == 32 ? ~0u : (1u << simdgroup.size) - 1;
    simdgroup.barriers = simdgroup.barriers_at_group_barrier = simdgroup.ordered[0] = simdgroup.ordered[1] = 0;
    simdgroup.matrix_accesses = 0;
    simdgroup.matrices.reset();
    simdgroup.tensor.number = 0;
  }
  sm_uint3 thread = {0, 0, 0};
  for (uint32_t i = 0; i < group.thread_count; ++i) {
    Lane& lane = group.lanes[i];
    lane.self = {{at.x * size.x + thread.x, at.y * size.y + thread.y, at.z * size.z + thread.z},
                 thread,
                 at,
                 grid,
                 extent,
                 size,
                 groups,
                 i,
                 i % SM_SIMD_WIDTH,
                 i / SM_SIMD_WIDTH,
                 group.simdgroup_count};
    lane.simdgroup = &group.simdgroups[i / SM_SIMD_WIDTH];
    lane.context = nullptr;
    lane.latest = nullptr;
    lane.state = State::kRunnable;
    lane.pending_matrices = lane.products = lane.tensor_products = lane.matrix_accesses = 0;
    if (++thread.x == extent.x) {
      thread.x = 0;
      if (++thread.y == extent.y) {
        thread.y = 0;
        ++thread.z;
      }
    }
  }
  place_threadgroup_memory(group);
  group.bindings = {launch_->buffers, group.threadgroup_arguments};
  counters.threads += group.thread_count;
  ++counters.threadgroups;
}

void Machine::place_threadgroup_memory(Group& group) {
  if (launch_->checker != nullptr) {
    uint32_t slot = 0;
    while (groups_[slot].get() != &group)
      ++slot;
    launch_->checker->place_threadgroup_memory(group, slot);
    return;
  }
  char* next = threadgroup_memory_.get();
  auto take = [&](uint32_t bytes, uint32_t align) {
    auto address = (reinterpret_cast<uintptr_t>(next) + align - 1) & ~static_cast<uintptr_t>(align - 1);
    next = reinterpret_cast<char*>(address + bytes);
    return reinterpret_cast<void*>(address);
  };
  for (uint32_t i = 0; i < SM_BUFFER_SLOTS; ++i) {
    group.threadgroup_arguments[i] = take(launch_->dispatch->threadgroup_bytes[i], 16);
  }
  group.variables.clear();
  for (const sm_threadgroup_site& site : *launch_->sites) {
    if (site.site >= group.variables.size()) group.variables.resize(site.site + 1);
    group.variables[site.site] = take(site.bytes, std::max(site.align, 16u));
  }
  std::memset(threadgroup_memory_.get(), kUnwritten, static_cast<size_t>(next - threadgroup_memory_.get()));
}

// ---- fibres --------------------------------------------------------------------------------------------------------

void Machine::fibre_main(void* machine) {
  auto& self = *static_cast<Machine*>(machine);
  Lane* lane = self.starting_;
  void* context;
  for (;;) {
    sm_self = &lane->self;
    self.launch_->kernel->entry(&lane->simdgroup->group->bindings);
    if (lane->pending_matrices != 0) sm_mma_sync();
    Simdgroup& simdgroup = *lane->simdgroup;
    lane->state = State::kDone;
    simdgroup.alive &= ~(1u << lane->self.thread_index_in_simdgroup);
    --simdgroup.group->alive;
    if (self.checked_ && simdgroup.alive == 0) report_missed_matrix_accesses(simdgroup);
    lane = self.pick(&simdgroup);
    // the picked thread has not started: it runs on this stack
    if (lane != nullptr && lane->context == nullptr) continue;
    self.fibres_.put_back(&context);
    if (lane != nullptr) {
      self.go_to(*lane, &context);
    } else {
      sm_switch(&context, self.main_context_);
    }
    lane = self.starting_;
  }
}

void Machine::go_to(Lane& lane, void** save) {
  void* to = lane.context;
  if (to == nullptr) {
    starting_ = &lane;
    to = fibres_.take();
  }
  sm_self = &lane.self;
  sm_switch(save, to);
}

void Machine::wait(Lane& lane, State state, const void* site) {
  lane.state = state;
  lane.site = lane.latest = site;
  switch_from(lane);
}

void Machine::switch_from(Lane& lane) {
  Simdgroup& simdgroup = *lane.simdgroup;
  Lane* next;
  if (!checked_ && simdgroup.runnable != 0) {
    next = &simdgroup.lanes[__builtin_ctz(simdgroup.runnable)];
    simdgroup.runnable &= simdgroup.runnable - 1;
  } else {
    next = pick(&simdgroup);
  }
  if (next == &lane) return;
  if (next == nullptr) give_up();
  go_to(*next, &lane.context);
  lane.context = nullptr;
}

void Machine::preempt(Lane& lane, const void* code) {
  lane.simdgroup->runnable |= 1u << lane.self.thread_index_in_simdgroup;
  lane.simdgroup->group->busy |= 1u << lane.self.simdgroup_index_in_threadgroup;
  lane.latest = code;
  switch_from(lane);
}

void Machine::give_up() {
  void* context;
  sm_switch(&context, main_context_);
  __builtin_unreachable();
}

// ---- scheduling ----------------------------------------------------------------------------------------------------

Lane* Machine::pick(Simdgroup* last) {
  while (!running_.empty() && !launch_->stopped) {
    if (launch_->expired) {
      report_expired(*launch_, current(), current().latest);
      return nullptr;
    }
    uint32_t at = checked_ ? random_.below(static_cast<uint32_t>(running_.size())) : 0;
    Group& group = *running_[at];
    if (Lane* lane = pick_in(group, last != nullptr && last->group == &group ? last : nullptr)) return lane;
    if (launch_->stopped) return nullptr;
    if (group.alive == 0) {
      if (!next_group(group)) running_.erase(running_.begin() + at);
    } else if (!release_barrier(group)) {
      report_stuck(*launch_, group);
      launch_->stopped = true;
    }
  }
  return nullptr;
}

Lane* Machine::pick_in(Group& group, Simdgroup* last) {
  uint32_t candidates = group.busy;
  uint32_t s = last != nullptr && !checked_ ? last->lanes[0].self.simdgroup_index_in_threadgroup : ~0u;
  for (;;) {
    if (s == ~0u) {
      if (candidates == 0) return nullptr;
      s = checked_ ? random_bit(random_, candidates) : static_cast<uint32_t>(__builtin_ctz(candidates));
    }
    Simdgroup& simdgroup = group.simdgroups[s];
    if (simdgroup.runnable == 0 && !release_simdgroup(simdgroup)) {
      if (launch_->stopped) return nullptr;
      candidates &= ~(1u << s);
      group.busy &= ~(1u << s);
      s = ~0u;
      continue;
    }
    uint32_t lane =
        checked_ ? random_bit(random_, simdgroup.runnable) : static_cast<uint32_t>(__builtin_ctz(simdgroup.runnable));
    simdgroup.runnable &= ~(1u << lane);
    return &simdgroup.lanes[lane];
  }
}

void Machine::release(Simdgroup& simdgroup, uint32_t lanes) {
  simdgroup.runnable |= lanes;
  for (; lanes != 0; lanes &= lanes - 1)
    simdgroup.lanes[__builtin_ctz(lanes)].state = State::kRunnable;
}

void Machine::wake_matrix_lanes(Simdgroup& simdgroup) {
  uint32_t lanes = 0;
  for (uint32_t i = 0; i < simdgroup.size; ++i)
    lanes |= (simdgroup.lanes[i].state == State::kMatrix ? 1u : 0u) << i;
  release(simdgroup, lanes);
}

// Called when no lane of the simdgroup can run. Releases the lanes that have met at a call. If lanes wait at different
// calls, the lanes at the call with the lowest address continue first. The other lanes join later, as after a branch on
// the GPU.
bool Machine::release_simdgroup(Simdgroup& simdgroup) {
  const void* first = nullptr;
  uint32_t at_first = 0;
  bool matrix = false;
  for (uint32_t rest = simdgroup.alive; rest != 0; rest &= rest - 1) {
    uint32_t i = static_cast<uint32_t>(__builtin_ctz(rest));
    const Lane& lane = simdgroup.lanes[i];
    if (lane.state == State::kExchange) {
      if (first == nullptr || lane.site < first) {
        first = lane.site;
        at_first = 0;
      }
      if (lane.site == first) at_first |= 1u << i;
    } else if (lane.state == State::kMatrix) {
      matrix = true;
    }
  }
  if (matrix && simdgroup.matrices.complete() > simdgroup.matrices.done()) {
    counters.mmas += simdgroup.matrices.compute(simdgroup.lanes);
    wake_matrix_lanes(simdgroup);
    return true;
  }
  if (at_first != 0) {
    release_exchange(simdgroup, at_first);
    return true;
  }
  uint32_t at_barrier = 0;
  for (uint32_t rest = simdgroup.alive; rest != 0; rest &= rest - 1) {
    uint32_t i = static_cast<uint32_t>(__builtin_ctz(rest));
    if (simdgroup.lanes[i].state == State::kSimdBarrier && simdgroup.lanes[i].site == simdgroup.lanes[0].site) {
      at_barrier |= 1u << i;
    }
  }
  if (at_barrier == 0) return false;
  uint32_t everyone = simdgroup.size == 32 ? ~0u : (1u << simdgroup.size) - 1;
  if (at_barrier != everyone) return false;  // reported by report_stuck when no other thread can run
  uint32_t flags = simdgroup.lanes[0].mem_flags;
  ++simdgroup.barriers;
  if (flags & 1) simdgroup.ordered[0] = simdgroup.barriers;
  if (flags & 2) simdgroup.ordered[1] = simdgroup.barriers;
  ++counters.simdgroup_barriers;
  release(simdgroup, at_barrier);
  return true;
}

void Machine::release_exchange(Simdgroup& simdgroup, uint32_t lanes) {
  uint32_t bytes = simdgroup.lanes[__builtin_ctz(lanes)].deposit_bytes;
  std::memset(simdgroup.slots, kUnwritten, SM_SIMD_WIDTH * bytes);
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    uint32_t i = static_cast<uint32_t>(__builtin_ctz(rest));
    std::memcpy(simdgroup.slots + i * bytes, simdgroup.lanes[i].deposit, bytes);
  }
  simdgroup.active = lanes;
  ++counters.simd_operations;
  release(simdgroup, lanes);
}

// Called when all remaining threads wait. If all wait at the same threadgroup barrier, opens it and returns true.
bool Machine::release_barrier(Group& group) {
  if (group.alive != group.thread_count) return false;
  const Lane& first = group.lanes[0];
  uint32_t flags = 3;
  for (uint32_t i = 0; i < group.thread_count; ++i) {
    const Lane& lane = group.lanes[i];
    if (lane.state != State::kBarrier || lane.site != first.site) return false;
    flags &= lane.mem_flags;
  }
  ++group.barriers;
  if (flags & 1) group.ordered[0] = group.barriers;
  if (flags & 2) group.ordered[1] = group.barriers;
  ++counters.threadgroup_barriers;
  for (uint32_t s = 0; s < group.simdgroup_count; ++s) {
    group.simdgroups[s].barriers_at_group_barrier = group.simdgroups[s].barriers;
    release(group.simdgroups[s], group.simdgroups[s].alive);
    group.busy |= 1u << s;
  }
  return true;
}

}  // namespace softmetal
