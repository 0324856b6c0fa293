// Examines one access: its bounds, whether its memory was written before, and its races.
#include "checker/checker.h"

#include <cstring>
#include <utility>

#include "compile/library.h"
#include "report.h"

namespace softmetal {
namespace {

constexpr uintptr_t kNullBytes = 64 * 1024;  // an address below this is a null pointer plus an offset
constexpr uint32_t kMeanAccessesBetweenPreemptions = 64;

}  // namespace

void Checker::access(const void* pointer, uint64_t bytes, bool is_write, Kind kind, const void* code) {
  if (sm_self == nullptr || machine_.fibres().contains(pointer) || bytes == 0) return;
  if (!unsettled_.empty()) settle();
  auto address = reinterpret_cast<uintptr_t>(pointer);
  Lane& lane = Machine::current();
  Region* region = find(address);
  if (region == nullptr) return elsewhere(lane, address, bytes, is_write, code);
  int64_t offset = reinterpret_cast<const char*>(address) - region->start;
  if (offset < 0 || static_cast<uint64_t>(offset) + bytes > region->bytes) {
    Fault fault{
        SM_FAULT_OUT_OF_BOUNDS, true, code,
        std::string("out-of-bounds ") + (is_write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes: "};
    fault.text += name(*region, offset, &fault.buffer, &fault.offset);
    report(lane, fault);
  }
  auto at = static_cast<uint64_t>(offset);
  if (is_write && region->is_const) {
    Fault fault{SM_FAULT_CONST_STORE, true, code, "store into a const buffer: "};
    fault.text += name(*region, offset, &fault.buffer, &fault.offset);
    report(lane, fault);
  }
  if (region->is_threadgroup) {
    (is_write ? threadgroup_written_ : threadgroup_read_) += bytes;
  } else if (!region->bindings.empty()) {
    (is_write ? written_ : read_)[region->binding_at(at).buffer] += bytes;
  }
  bool all_written = region->mark(at, bytes, is_write ? kWritten | kWrittenHere : kReadHere);
  if (!all_written && (!is_write || kind == Kind::kAtomicUpdate))
    report_unwritten(lane, *region, at, bytes, kind, code);
  region->is_written |= is_write;
  if (region->is_tracked) check_races(lane, *region, at, bytes, is_write, kind, code);
  const bool is_atomic = kind == Kind::kAtomic || kind == Kind::kAtomicUpdate;
  if (!unsettled_.empty()) {
    Unsettled& write = unsettled_.back();
    if (is_atomic) {
      const std::vector<Fault> faults = std::move(write.faults);
      unsettled_.clear();
      for (const Fault& fault : faults)
        report(lane, fault);
    } else {
      write.memory = static_cast<const char*>(pointer);
      write.before.assign(write.memory, write.memory + bytes);
    }
  }
  if (launch_.expired) {
    report_expired(launch_, lane, code);
    machine_.give_up();
  }
  // An unsettled write must be executed before another thread runs.
  if (!launch_.preempts || !unsettled_.empty()) return;
  if (--until_preemption_ == 0 || (is_atomic && machine_.random().below(2) == 0)) {
    until_preemption_ = 1 + machine_.random().below(2 * kMeanAccessesBetweenPreemptions);
    machine_.preempt(lane, code);
  }
}

void Checker::elsewhere(Lane& lane, uintptr_t address, uint64_t bytes, bool is_write, const void* code) {
  for (const Range& range : executor_memory_) {
    if (address - range.start < range.bytes && !is_write) return;
  }
  const sm_library& library = *launch_.dispatch->library;
  bool in_library =
      reinterpret_cast<const char*>(address) >= library.low && reinterpret_cast<const char*>(address) < library.high;
  Fault fault{in_library ? SM_FAULT_CONST_STORE : SM_FAULT_OUT_OF_BOUNDS, true, code, ""};
  std::string what = is_write ? "write" : "read";
  if (in_library) {
    fault.text = "store into constant memory";
  } else if (address < kNullBytes) {
    fault.text =
        "out-of-bounds " + what + " of " + std::to_string(bytes) + " bytes: null pointer + " + std::to_string(address);
  } else {
    fault.text = "out-of-bounds " + what + " of " + std::to_string(bytes) +
                 " bytes: an address in no buffer that is bound or resident (useResource)";
  }
  report(lane, fault);
}

void Checker::settle() {
  for (Unsettled& write : std::exchange(unsettled_, {})) {
    const bool is_equal = std::memcmp(write.before.data(), write.memory, write.before.size()) == 0;
    for (Fault& fault : write.faults) {
      if (is_equal) {
        fault.kind = SM_WARNING_EQUAL;
        fault.text = "the value was there before: " + fault.text;
      }
      report_later(launch_, write.thread, fault);
    }
  }
}

void Checker::report_unwritten(Lane& lane, Region& region, uint64_t offset, uint64_t bytes, Kind kind,
                               const void* code) {
  uint64_t unwritten = 0;
  for (uint64_t i = 0; i < bytes; ++i)
    unwritten += (*region.flag(offset + i) & kWritten) == 0;
  if (kind == Kind::kCopy && unwritten < bytes) return;  // padding of a struct may be unwritten
  Fault fault{SM_FAULT_UNINITIALISED, false, code,
              std::string("read of ") + (region.is_threadgroup ? "threadgroup" : "device") + " memory never written: "};
  fault.text += name(region, static_cast<int64_t>(offset), &fault.buffer, &fault.offset);
  report(lane, fault);
}

void Checker::check_races(Lane& lane, Region& region, uint64_t offset, uint64_t bytes, bool is_write, Kind kind,
                          const void* code) {
  const Group& group = *lane.simdgroup->group;
  const Simdgroup& simdgroup = *lane.simdgroup;
  const int space = region.is_threadgroup ? 1 : 0;
  Access now;
  now.group = static_cast<uint32_t>(group.index) + 1;
  now.thread = lane.self.thread_index_in_threadgroup & 0x3FF;
  now.barriers = group.barriers;
  now.simd_barriers = simdgroup.barriers;
  now.code = static_cast<uint32_t>(static_cast<const char*>(code) - launch_.dispatch->library->base) & 0x3FFFFF;
  auto conflicts = [&](const Access& other) {
    if (other.group == 0) return false;
    if (other.group != now.group) return !region.is_threadgroup;
    if (other.thread == now.thread || other.barriers < group.ordered[space]) return false;
    return other.simdgroup() != now.simdgroup() || other.simd_barriers >= simdgroup.ordered[space];
  };
  const bool is_atomic = kind == Kind::kAtomic || kind == Kind::kAtomicUpdate;
  uint32_t count;
  Cell* cells = region.cells(offset, static_cast<uint32_t>(bytes), &count);
  AtomicCell* atomic_cells = region.atomic_cells(offset, is_atomic);
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t at = offset + i * region.granule;
    auto check = [&](const Access& other, bool other_wrote) {
      if (conflicts(other)) report_race(lane, region, at, other, other_wrote, is_write, code);
    };
    auto check_all = [&](const History& others, bool other_wrote) {
      for (const Access& other : others.last)
        check(other, other_wrote);
    };
    Cell& cell = cells[i];
    check(cell.write, true);
    if (is_write) check_all(cell.reads, false);
    if (is_atomic) {
      AtomicCell& atomic = atomic_cells[i];
      (is_write ? atomic.writes : atomic.reads).add(now);
      continue;
    }
    if (atomic_cells != nullptr) {
      check_all(atomic_cells[i].writes, true);
      if (is_write) check_all(atomic_cells[i].reads, false);
    }
    if (is_write) {
      cell.write = now;
    } else {
      cell.reads.add(now);
    }
  }
}

void Checker::count(sm_counters& counters) const {
  counters.has_bytes = 1;
  counters.threadgroup_bytes_read = threadgroup_read_;
  counters.threadgroup_bytes_written = threadgroup_written_;
  for (const auto& region : device_) {
    if (!region) continue;
    region->for_each_touched([&](uint64_t first, uint64_t end) {
      for (uint64_t i = first; i < end; ++i) {
        uint8_t flag = *region->flag(i);
        if ((flag & (kReadHere | kWrittenHere)) == 0) continue;
        int32_t buffer = region->binding_at(i).buffer;
        counters.buffer_distinct_read[buffer] += (flag & kReadHere) != 0;
        counters.buffer_distinct_written[buffer] += (flag & kWrittenHere) != 0;
      }
    });
  }
  for (uint32_t i = 0; i < SM_BUFFER_SLOTS; ++i) {
    counters.device_bytes_read += counters.buffer_bytes_read[i] = read_[i];
    counters.device_bytes_written += counters.buffer_bytes_written[i] = written_[i];
    counters.distinct_bytes_read += counters.buffer_distinct_read[i];
    counters.distinct_bytes_written += counters.buffer_distinct_written[i];
  }
}

}  // namespace softmetal
