// Helpers that several tests of the GPU planners use.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "csrc/planner/plan.h"
#include "tests/support/expect.h"

using marlin::test::expect;
using marlin::test::subject;

// Checks that the planner refuses the call in the body.
template <typename Body>
void expect_refused(const std::string& what, const Body& body) {
  subject = "refusals";
  try {
    body();
    expect(false, "no error: " + what);
  } catch (const std::invalid_argument&) {
    expect(true, what);
  }
}

// Checks that `blocks` blocks of `length` cover [0, size), and that none of them is empty.
inline void expect_tiling(uint64_t blocks, uint64_t length, uint64_t size, const std::string& what) {
  expect(blocks * length >= size, what + ": the blocks cover everything");
  expect((blocks - 1) * length < size, what + ": no block is empty");
}

template <typename T>
std::string text(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

inline marlin::GemmProblem square(uint32_t M, uint32_t N, uint32_t K, uint32_t group_size,
                                  std::string_view variant = "auto") {
  marlin::GemmProblem problem{.M = M, .a_row_stride = K, .vector_aligned_a = true, .variant = variant};
  problem.weight = {.K = K, .N = N, .group_size = group_size, .vector_aligned = true};
  return problem;
}
