#include "report.h"

#include <algorithm>

#include "compile/library.h"

namespace softmetal {
namespace {

constexpr size_t kMostFaults = 16;  // of a launch

std::string position(sm_uint3 p) {
  return "(" + std::to_string(p.x) + "," + std::to_string(p.y) + "," + std::to_string(p.z) + ")";
}

std::string place(const SourceLine& at) {
  return at.line == 0 ? "an unknown line" : at.file + ":" + std::to_string(at.line);
}

const char* keep(Launch& launch, const std::string& text) {
  return launch.texts.emplace_back(text).c_str();
}

void record(Launch& launch, const sm_thread& thread, const Fault& fault) {
  const sm_library& library = *launch.dispatch->library;
  SourceLine at = source_line(library, fault.code);
  std::string text = fault.text + ", at " + place(at);
  if (fault.other_code != nullptr) text += ", other access at " + place(source_line(library, fault.other_code));
  text += "; thread " + position(thread.thread_position_in_threadgroup) + ", simdgroup " +
          std::to_string(thread.simdgroup_index_in_threadgroup) + ", threadgroup " +
          position(thread.threadgroup_position_in_grid) + ", kernel '" + launch.kernel->name + "'";
  if (launch.checker != nullptr) text += ", seed " + std::to_string(launch.dispatch->seed);
  std::lock_guard<std::mutex> lock(launch.mutex);
  for (const sm_fault& known : launch.faults) {
    bool same = known.kind == fault.kind && known.line == at.line && known.line != 0 && at.file == known.file;
    if (same && known.buffer == fault.buffer) return;
  }
  if (launch.faults.size() >= kMostFaults) {
    launch.stopped = launch.stopped || fault.kind < SM_FIRST_WARNING;
    return;
  }
  const char* message = keep(launch, text);
  const char* file = keep(launch, at.file);
  launch.faults.push_back({fault.kind, fault.is_fatal, message, launch.kernel->name, file, at.line,
                           thread.thread_position_in_threadgroup, thread.threadgroup_position_in_grid,
                           thread.simdgroup_index_in_threadgroup, fault.buffer, fault.offset});
}

const char* waits_at(const Lane& lane) {
  switch (lane.state) {
    case State::kBarrier:
      return "threadgroup_barrier";
    case State::kSimdBarrier:
      return "simdgroup_barrier";
    case State::kMatrix:
      return "simdgroup matrix operation";
    default:
      return "simd operation";
  }
}

}  // namespace

void report_expired(Launch& launch, Lane& lane, const void* code) {
  if (source_line(*launch.dispatch->library, code).line == 0) code = lane.latest;
  std::string seconds = std::to_string(launch.watchdog);
  seconds.erase(std::min(seconds.find('.') + 2, seconds.size()));
  record(launch, lane.self,
         {SM_FAULT_ENDLESS, true, code,
          "the dispatch has not ended after " + seconds +
              " seconds of processor time (SOFTMETAL_WATCHDOG): an endless "
              "loop? A thread that still runs"});
  launch.stopped = true;
}

void report(Lane& lane, const Fault& fault) {
  Machine& machine = machine_of(lane);
  record(machine.launch(), lane.self, fault);
  if (!fault.is_fatal && !machine.launch().stopped) return;
  machine.launch().stopped = true;
  machine.give_up();
}

void report_later(Launch& launch, const sm_thread& thread, const Fault& fault) {
  record(launch, thread, fault);
}

void report_launch(Launch& launch, const std::string& text) {
  std::lock_guard<std::mutex> lock(launch.mutex);
  const char* name = launch.kernel != nullptr ? launch.kernel->name : "";
  const char* message = keep(launch, text + ", kernel '" + name + "'");
  launch.faults.push_back({SM_FAULT_RESOURCE, 1, message, name, "", 0, {}, {}, 0, -1, 0});
  launch.stopped = true;
}

void report_missed_matrix_accesses(Simdgroup& simdgroup) {
  uint32_t most = simdgroup.matrix_accesses, reached = 0;
  for (uint32_t i = 0; i < simdgroup.size; ++i)
    reached += simdgroup.lanes[i].matrix_accesses == most;
  if (most == 0 || reached == SM_SIMD_WIDTH) return;
  Fault fault{SM_FAULT_SIMD, false, simdgroup.matrix_sites[(most - 1) % 64],
              "simdgroup matrix load or store reached by " + std::to_string(reached) + " of 32 threads"};
  if (simdgroup.size < SM_SIMD_WIDTH) fault.text += ": the simdgroup is not full";
  record(simdgroup.group->machine->launch(), simdgroup.lanes[0].self, fault);
}

void report_stuck(Launch& launch, Group& group) {
  // If a thread waits at a simd operation, the report names that thread, because threads at the barrier may be waiting
  // for it.
  const Lane* lane = nullptr;
  for (uint32_t i = 0; i < group.thread_count; ++i) {
    const Lane& candidate = group.lanes[i];
    if (candidate.state == State::kDone) continue;
    bool is_inner = candidate.state != State::kBarrier;
    if (lane == nullptr || (is_inner && lane->state == State::kBarrier)) lane = &candidate;
  }
  bool is_barrier = lane->state == State::kBarrier;
  uint32_t first = is_barrier ? 0 : lane->self.simdgroup_index_in_threadgroup * SM_SIMD_WIDTH;
  uint32_t count = is_barrier ? group.thread_count : lane->simdgroup->size;
  uint32_t here = 0;
  const Lane* other = nullptr;
  for (uint32_t i = first; i < first + count; ++i) {
    const Lane& candidate = group.lanes[i];
    if (candidate.state == lane->state && candidate.site == lane->site) {
      ++here;
    } else if (other == nullptr) {
      other = &candidate;
    }
  }
  uint32_t expected = is_barrier ? group.thread_count : SM_SIMD_WIDTH;
  Fault fault{is_barrier || lane->state == State::kSimdBarrier ? SM_FAULT_BARRIER : SM_FAULT_SIMD, true, lane->site,
              ""};
  fault.text = std::string(waits_at(*lane)) + " reached by " + std::to_string(here) + " of " +
               std::to_string(expected) + " threads";
  if (other == nullptr) {
    fault.text += ": the simdgroup is not full";
  } else {
    fault.text += ": thread " + position(other->self.thread_position_in_threadgroup);
    if (other->state == State::kDone) {
      fault.text += " has returned";
    } else {
      fault.text += std::string(" waits in a ") + waits_at(*other) + " at " +
                    place(source_line(*launch.dispatch->library, other->site));
    }
  }
  record(launch, lane->self, fault);
}

}  // namespace softmetal
