// The instructions and threads of the machine on which a CPU kernel runs. Does not use torch.
#pragma once

#include <cstdint>
#include <functional>

#include "csrc/cpu/capability.h"

namespace marlin::cpu {

// Runs body(begin, end) over disjoint ranges that cover [0, count), possibly on several threads. The operators use
// PyTorch's thread pool; C++ tests use a plain loop.
using Body = std::function<void(int64_t begin, int64_t end)>;
struct Parallel {
  int num_threads;
  std::function<void(int64_t count, int64_t grain, const Body& body)> run;
};

struct Machine {
  Isa isa;
  bool fast_bf16_dot;
  int threads;
  bool byte_dot = false;
  bool byte_matrix = false;
};

inline Machine this_machine(const Parallel& parallel) {
  return {capability().isa, detected().fast_bf16_dot, parallel.num_threads, detected().byte_dot,
          detected().byte_matrix};
}

}  // namespace marlin::cpu
