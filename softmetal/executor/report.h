// Faults: collected once per source line and kind, worded for the reader.
#pragma once

#include <string>

#include "machine.h"

namespace softmetal {

struct Fault {
  uint32_t kind;
  bool is_fatal;
  const void* code;  // where: a return address in the library
  std::string text;  // what happened, without the place
  const void* other_code = nullptr;
  int32_t buffer = -1;
  int64_t offset = 0;
};

// Records the fault for the thread `lane`. A fatal one stops the launch and does not return (on a fibre).
void report(Lane& lane, const Fault& fault);

// A fault of the launch itself, before any thread runs.
void report_launch(Launch& launch, const std::string& text);

// All lanes have returned: a matrix load or store that some of them did not reach is a fault.
void report_missed_matrix_accesses(Simdgroup& simdgroup);

// No thread of the group can go on: says which barrier or simd operation was not reached, and by whom.
void report_stuck(Launch& launch, Group& group);

}  // namespace softmetal
