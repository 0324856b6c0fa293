// Checked mode: examines each load and store of a kernel before the access happens. instrument.cpp calls the checker.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "checker/region.h"
#include "machine.h"
#include "report.h"

namespace softmetal {

// Gives each buffer, and each array of threadgroup memory, an address range far from every other range. Even an address
// far out of bounds therefore identifies its buffer or array.
class Checker {
 public:
  Checker(Launch& launch, Machine& machine, uint32_t concurrent);
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  // Returns the checker of the current launch, or null if there is none.
  static Checker* active();

  // kAtomic is an atomic load or store. kAtomicUpdate is a read-modify-write. kCopy copies a whole struct with padding.
  enum class Kind { kPlain, kAtomic, kAtomicUpdate, kCopy };

  void place_threadgroup_memory(Group& group, uint32_t slot);
  void access(const void* address, uint64_t bytes, bool is_write, Kind kind, const void* code);
  // Reports a store of a value computed from an uninitialised variable.
  void unset_value(const void* address, const void* code);
  void misaligned(const void* address, uint32_t alignment, const void* code);

  // Called when the latest access has been executed. Reports the races of its unsettled writes.
  void settle();
  // Called after the launch. Copies the contents back to the host's buffers, with the flags of initialized bytes.
  void write_back();
  void count(sm_counters& counters) const;

 private:
  Region* find(uintptr_t address) const;
  void bind_buffers();
  void bind_threadgroup_memory(uint32_t concurrent);
  void elsewhere(Lane& lane, uintptr_t address, uint64_t bytes, bool is_write, const void* code);
  void report_unwritten(Lane& lane, Region& region, uint64_t offset, uint64_t bytes, Kind kind, const void* code);
  void check_races(Lane& lane, Region& region, uint64_t offset, uint64_t bytes, bool is_write, Kind kind,
                   const void* code);
  void report_race(Lane& lane, Region& region, uint64_t offset, const Access& other, bool other_wrote, bool is_write,
                   const void* code);
  bool is_argument_const(uint32_t slot, bool* is_used) const;
  std::string name(const Region& region, int64_t offset, int32_t* buffer, int64_t* from_buffer) const;

  struct Range {
    uintptr_t start, bytes;
  };
  // A racing write that is not executed yet. The checker sees an access before it is executed, so it stores the old
  // contents of the memory. If the write does not change these contents, the race is only a warning.
  struct Unsettled {
    sm_thread thread;
    const char* memory;
    std::vector<char> before;
    std::vector<Fault> faults;
  };

  Launch& launch_;
  Machine& machine_;
  std::vector<std::unique_ptr<Region>> device_;       // by slot; null if nothing is bound
  std::vector<std::unique_ptr<Region>> threadgroup_;  // by place (memory.cpp)
  std::vector<std::unique_ptr<Region>> resident_;     // regions of those buffers in `resident` that are in no slot
  std::vector<Region*> in_place_;                     // regions at the host's addresses
  std::vector<Unsettled> unsettled_;                  // the unsettled writes of the latest access
  std::vector<Range> executor_memory_;
  uint32_t until_preemption_ = 1;
  uint64_t threadgroup_read_ = 0, threadgroup_written_ = 0;
  uint64_t read_[SM_BUFFER_SLOTS] = {}, written_[SM_BUFFER_SLOTS] = {};
};

}  // namespace softmetal
