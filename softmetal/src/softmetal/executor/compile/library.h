// A loaded Metal library, and the source lines of its code.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "abi.h"

struct sm_library {
  std::string path;
  const sm_library_table* table;
  std::vector<sm_kernel> kernels;                       // static_threadgroup_bytes is filled in
  std::vector<std::vector<sm_threadgroup_site>> sites;  // the sites of each kernel
  const char* base;                                     // the load address
  const char* low;                                      // the mapped range
  const char* high;
};

namespace softmetal {

struct SourceLine {
  std::string file;
  uint32_t line = 0;  // 0: unknown
};

// Returns the user's source line of a return address: the innermost inlined frame outside our own headers.
SourceLine source_line(const sm_library& library, const void* return_address);

}  // namespace softmetal
