// Checked mode: every load and store of a kernel is looked at before it happens (instrument.cpp calls).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "machine.h"
#include "region.h"

namespace softmetal {

// Buffers are copied to addresses far from each other, so that an address tells which buffer it was meant for, however
// far out of bounds; so is every array of threadgroup memory.
class Checker {
 public:
  Checker(Launch& launch, Machine& machine, uint32_t concurrent);
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  // The checker of the launch under way, null outside.
  static Checker* active();

  enum class Kind { kPlain, kAtomic, kCopy };  // kCopy: a whole struct, padding included

  void place_threadgroup_memory(Group& group, uint32_t slot);
  void access(const void* address, uint64_t bytes, bool is_write, Kind kind, const void* code);
  void misaligned(const void* address, uint32_t alignment, const void* code);

  // After the launch: contents and what was initialised go back to the host's buffers.
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

  Launch& launch_;
  Machine& machine_;
  std::vector<std::unique_ptr<Region>> device_;       // by slot; null where nothing is bound
  std::vector<std::unique_ptr<Region>> threadgroup_;  // by place (see checker.cpp)
  std::vector<Range> executor_memory_;
  uint32_t until_preemption_ = 1;
  uint64_t threadgroup_read_ = 0, threadgroup_written_ = 0;
  uint64_t read_[SM_BUFFER_SLOTS] = {}, written_[SM_BUFFER_SLOTS] = {};
};

}  // namespace softmetal
