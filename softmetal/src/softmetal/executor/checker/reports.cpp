// The texts of the checker's reports.
#include <algorithm>

#include "checker/checker.h"
#include "compile/library.h"
#include "report.h"

namespace softmetal {

void Checker::report_race(Lane& lane, Region& region, uint64_t offset, const Access& other, bool other_wrote,
                          bool is_write, const void* code) {
  const Group& group = *lane.simdgroup->group;
  const Simdgroup& mine = *lane.simdgroup;
  const char* flag = region.is_threadgroup ? "mem_threadgroup" : "mem_device";
  Fault fault{SM_FAULT_RACE, false, code, is_write ? "race: write" : "race: read"};
  fault.text += other_wrote ? " of what another thread wrote" : " over what another thread read";
  fault.other_code = launch_.dispatch->library->base + other.code;
  if (other.group != static_cast<uint32_t>(group.index) + 1) {
    fault.kind = SM_FAULT_RACE_GROUPS;
    fault.text += ", in another threadgroup: ";
  } else {
    const Simdgroup& theirs = group.simdgroups[other.simdgroup()];
    bool is_same = &theirs == &mine;
    if (other.barriers < group.barriers) {
      fault.kind = SM_FAULT_WRONG_FLAG;
      fault.text += std::string(", the threadgroup_barrier between them lacks mem_flags::") + flag + ": ";
    } else if (is_same && other.simd_barriers < mine.barriers) {
      fault.kind = SM_FAULT_WRONG_FLAG;
      fault.text += std::string(", the simdgroup_barrier between them lacks mem_flags::") + flag + ": ";
    } else if (!is_same && (theirs.barriers > other.simd_barriers || mine.barriers > mine.barriers_at_group_barrier)) {
      fault.kind = SM_FAULT_WEAK_BARRIER;
      fault.text += " of another simdgroup, a simdgroup_barrier is no threadgroup_barrier: ";
    } else {
      fault.text += ", no barrier between: ";
    }
  }
  fault.text += name(region, static_cast<int64_t>(offset), &fault.buffer, &fault.offset);
  fault.text += " (thread " + std::to_string(other.thread) + " of simdgroup " + std::to_string(other.simdgroup()) + ")";
  if (!is_write) return report(lane, fault);
  if (unsettled_.empty()) unsettled_.push_back({lane.self, nullptr, {}, {}});
  unsettled_.back().faults.push_back(std::move(fault));
}

void Checker::unset_value(const void* address, const void* code) {
  Region* region = sm_self != nullptr ? find(reinterpret_cast<uintptr_t>(address)) : nullptr;
  if (region == nullptr) return;  // the thread's own memory
  Fault fault{SM_FAULT_UNINITIALISED, false, code, "store of the value of a variable that was never set: "};
  fault.text += name(*region, static_cast<const char*>(address) - region->start, &fault.buffer, &fault.offset);
  report(Machine::current(), fault);
}

void Checker::misaligned(const void* address, uint32_t alignment, const void* code) {
  if (sm_self == nullptr) return;
  Lane& lane = Machine::current();
  Fault fault{SM_FAULT_MISALIGNED, true, code,
              "misaligned access, " + std::to_string(alignment) + "-byte alignment is needed: "};
  Region* region = find(reinterpret_cast<uintptr_t>(address));
  if (region == nullptr) {
    fault.text += "thread memory";
  } else {
    fault.text += name(*region, static_cast<const char*>(address) - region->start, &fault.buffer, &fault.offset);
  }
  report(lane, fault);
}

std::string Checker::name(const Region& region, int64_t offset, int32_t* buffer, int64_t* from_buffer) const {
  auto argument_name = [&](uint32_t kind, int32_t index) -> std::string {
    for (uint32_t i = 0; i < launch_.kernel->argument_count; ++i) {
      const sm_argument& argument = launch_.kernel->arguments[i];
      if (argument.kind == kind && argument.index == static_cast<uint32_t>(index)) return argument.name;
    }
    return "";
  };
  auto signed_offset = [](int64_t n) { return (n < 0 ? " - " : " + ") + std::to_string(n < 0 ? -n : n); };
  *from_buffer = offset;
  if (region.is_threadgroup) {
    std::string array = region.argument >= 0
                            ? "threadgroup(" + std::to_string(region.argument) + ")" + signed_offset(offset) + " (" +
                                  argument_name(SM_ARGUMENT_THREADGROUP, region.argument)
                            : "threadgroup variable " + std::to_string(region.variable) + signed_offset(offset) + " (";
    return array + (region.argument >= 0 ? ", " : "") + std::to_string(region.bytes) + " bytes)";
  }
  if (region.bindings.empty()) {
    return "a resident buffer" + signed_offset(offset) + " (" + std::to_string(region.bytes) + " bytes)";
  }
  const Binding& binding = region.binding_at(offset < 0 ? 0 : static_cast<uint64_t>(offset));
  *buffer = binding.buffer;
  *from_buffer = offset - static_cast<int64_t>(binding.offset);
  const sm_buffer& bound = launch_.dispatch->buffers[*buffer];
  std::string text = "buffer " + std::to_string(*buffer) + signed_offset(*from_buffer) + " (" +
                     argument_name(SM_ARGUMENT_BUFFER, *buffer);
  if (bound.label != nullptr) text += std::string(", '") + bound.label + "'";
  return text + ", " + std::to_string(bound.length - std::min(bound.offset, bound.length)) + " bytes)";
}

}  // namespace softmetal
