// Runs the GPU threads of one or more threadgroups as fibres on one OS thread, with simdgroups and barriers.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "executor.h"
#include "fibre.h"
#include "mma.h"
#include "random.h"
#include "tensor.h"
#include "traps.h"

namespace softmetal {

class Machine;
class Checker;
struct Simdgroup;
struct Group;

constexpr uint32_t kMaxSimdgroups = SM_MAX_THREADS / SM_SIMD_WIDTH;

constexpr uint32_t kMaxConcurrentGroups = 4;  // threadgroups that checked mode interleaves

enum class State : uint8_t {
  kRunnable,     // fresh, released or preempted
  kExchange,     // waits at a simd operation in which any subset of the lanes may take part
  kSimdBarrier,  // waits at an operation that the whole simdgroup must reach
  kMatrix,       // waits for other lanes' operands of a matrix product
  kBarrier,      // waits at a threadgroup barrier
  kDone,
};

// One GPU thread.
struct Lane {
  sm_thread self;  // first member, because sm_self points to it
  Simdgroup* simdgroup;
  void* context;              // where to continue; null: not started
  const void* site;           // return address of the call in which the lane waits
  const void* latest;         // return address of the lane's latest call into the executor
  uint64_t pending_matrices;  // Bloom filter of the matrices that deferred products will write
  uint64_t products;          // number of products that the lane has deposited
  uint64_t tensor_products;   // number of products of tensor units in which the lane has taken part
  uint32_t matrix_accesses;   // matrix loads and stores, counted in checked mode
  State state;
  uint32_t deposit_bytes;
  uint32_t mem_flags;
  alignas(16) unsigned char deposit[64];
};

struct Simdgroup {
  Group* group;
  Lane* lanes;
  uint32_t size;
  uint32_t runnable;    // lanes that can continue, without the running lane
  uint32_t alive;       // lanes that have not returned
  uint32_t active;      // lanes of the latest exchange
  uint32_t barriers;    // simdgroup barriers passed
  uint32_t ordered[2];  // numbers of the latest barriers with the flags of device memory and of threadgroup memory
  uint32_t barriers_at_group_barrier;  // barriers passed at the latest threadgroup barrier
  uint32_t matrix_accesses;            // the largest count of all lanes, in checked mode
  const void* matrix_sites[64];        // call sites of the latest matrix accesses
  alignas(64) unsigned char slots[SM_SIMD_WIDTH * 64];
  MatrixQueue matrices;
  TensorOperands tensor;
};

struct Group {
  Machine* machine;
  uint64_t index;  // linear index in the grid
  uint32_t thread_count;
  uint32_t simdgroup_count;
  uint32_t alive;
  uint32_t busy;        // simdgroups that may have runnable lanes
  uint32_t barriers;    // threadgroup barriers passed
  uint32_t ordered[2];  // numbers of the latest barriers with the flags of device memory and of threadgroup memory
  std::unique_ptr<Lane[]> lanes;
  std::unique_ptr<Simdgroup[]> simdgroups;
  sm_bindings bindings;
  void* threadgroup_arguments[SM_BUFFER_SLOTS];
  std::vector<void*> variables;  // by site
};

// State that all machines of one dispatch share.
struct Launch {
  const sm_dispatch* dispatch;
  const sm_kernel* kernel;
  sm_uint3 groups;
  uint64_t group_count;
  void* buffers[SM_BUFFER_SLOTS];
  const std::vector<sm_threadgroup_site>* sites;  // the sites of this kernel
  Checker* checker;                               // null in fast mode
  std::vector<uint32_t> order;                    // order of threadgroups; empty: ascending
  std::atomic<uint64_t> next_group{0};
  bool preempts = true;  // the machine may switch to another thread before each access
  std::atomic<bool> stopped{false};
  double watchdog = 0;               // seconds; 0: none
  std::atomic<bool> expired{false};  // the watchdog's time is over
  std::mutex mutex;                  // guards the members below
  std::deque<std::string> texts;
  std::vector<sm_fault> faults;
  sm_counters counters{};
};

class Machine {
 public:
  explicit Machine(bool checked);
  ~Machine();

  // Runs threadgroups of the launch, `concurrent` at a time, until none is left or the launch is stopped.
  void run(Launch& launch, uint32_t concurrent);

  static Lane& current() { return *reinterpret_cast<Lane*>(const_cast<sm_thread*>(sm_self)); }

  // A GPU thread calls the next four functions, on its own fibre.
  void wait(Lane& lane, State state, const void* site);
  void preempt(Lane& lane, const void* code);
  [[noreturn]] void give_up();  // returns to run() because the launch was stopped
  void wake_matrix_lanes(Simdgroup& simdgroup);

  void prepare(uint32_t concurrent);
  const Group& group(uint32_t i) const { return *groups_[i]; }
  Launch& launch() { return *launch_; }
  bool is_checked() const { return checked_; }
  const FibrePool& fibres() const { return fibres_; }
  Random& random() { return random_; }
  sm_counters counters{};

 private:
  static void fibre_main(void* machine);
  bool next_group(Group& group);
  void set_up(Group& group, uint64_t index);
  void place_threadgroup_memory(Group& group);
  // Returns the next thread to run, or null if none is left. Stops the launch if threads wait forever.
  Lane* pick(Simdgroup* last);
  Lane* pick_in(Group& group, Simdgroup* last);
  void switch_from(Lane& lane);
  void go_to(Lane& lane, void** save);
  bool release_simdgroup(Simdgroup& simdgroup);
  void release(Simdgroup& simdgroup, uint32_t lanes);
  void release_exchange(Simdgroup& simdgroup, uint32_t lanes);
  bool release_barrier(Group& group);

  bool checked_;
  Launch* launch_ = nullptr;
  FibrePool fibres_;
  SignalStack signal_stack_;
  void* main_context_ = nullptr;
  Lane* starting_ = nullptr;  // the first lane that the next fibre runs
  Random random_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<Group*> running_;
  std::unique_ptr<char[]> threadgroup_memory_;
};

inline Machine& machine_of(Lane& lane) {
  return *lane.simdgroup->group->machine;
}

}  // namespace softmetal
