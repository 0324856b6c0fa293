// Collects faults, one for each source line and kind of fault, and writes the messages.
#pragma once

#include <string>

#include "machine.h"

namespace softmetal {

struct Fault {
  uint32_t kind;
  bool is_fatal;
  const void* code;  // a return address in the library
  std::string text;  // what happened, without the source line
  const void* other_code = nullptr;
  int32_t buffer = -1;
  int64_t offset = 0;
};

// Records a fault of the thread `lane`. If this thread is running, a fatal fault stops the launch, and the function
// does not return.
void report(Lane& lane, const Fault& fault);

// Records a fault of `thread` that is found only after the thread has run. The thread that is running is not at fault
// and continues.
void report_later(Launch& launch, const sm_thread& thread, const Fault& fault);

// Records a fault of the launch itself, before any thread runs.
void report_launch(Launch& launch, const std::string& text);

// Records that `lane` was running when the watchdog's time ended, and stops the launch.
void report_expired(Launch& launch, Lane& lane, const void* code);

// Called when all lanes have returned. Reports matrix loads and stores that some lanes did not reach.
void report_missed_matrix_accesses(Simdgroup& simdgroup);

// Called when no thread of the group can continue. Reports the barrier or simd operation that some threads did not
// reach.
void report_stuck(Launch& launch, Group& group);

}  // namespace softmetal
