// Checked mode: every load and store of a kernel goes through here (from the instrumentation, instrument.cpp).
#pragma once

#include <cstdint>

#include "machine.h"

namespace softmetal {

class Checker {
 public:
  explicit Checker(Launch& launch);
  void place_threadgroup_memory(Group& group, uint32_t slot);
  void atomic(Lane& lane, const void* address, uint32_t bytes, bool is_write, const void* code);
};

}  // namespace softmetal
