// Helpers that several tests of the GPU planners use.
#pragma once

#include <cmath>
#include <cstdint>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "csrc/planner/plan.h"
#include "tests/support/expect.h"

using marlin::test::expect;
using marlin::test::subject;

// Returns a GPU with all cores of the chip.
inline marlin::GpuDevice whole(const marlin::Chip& chip) {
  return {chip.cores, true, &chip};
}

// Checks that a value differs from the expected value by at most `tolerance` times the expected value.
inline void expect_close(double value, double wanted, double tolerance, const std::string& what) {
  expect(std::abs(value - wanted) <= tolerance * wanted,
         what + ": expected " + std::to_string(wanted) + ", got " + std::to_string(value));
}

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

// Returns the names of all kernel functions.
inline std::set<std::string> all_functions() {
  std::set<std::string> names;
  for (size_t kernel = 0; kernel < marlin::kKernels.size(); ++kernel) {
    for (int format = 0; format < marlin::kWeightFormatCount; ++format) {
      for (int type = 0; type < 3; ++type) {
        names.insert(marlin::host_name({static_cast<marlin::Kernel>(kernel), static_cast<marlin::WeightFormat>(format),
                                        static_cast<marlin::ElementType>(type)}));
      }
    }
  }
  return names;
}

// Checks rules that hold for each dispatch of a plan.
inline void check_dispatch(const marlin::Dispatch& dispatch) {
  static const std::set<std::string> names = all_functions();
  const std::string function = host_name(dispatch.instance);
  expect(names.contains(function), "the kernel exists: " + function);
  expect(dispatch.grid.x > 0 && dispatch.grid.y > 0 && dispatch.grid.z > 0, "the grid is not empty");
  const uint32_t threads = dispatch.threads.x * dispatch.threads.y * dispatch.threads.z;
  expect(threads > 0 && threads <= 1024, "1 to 1024 threads");
  expect(dispatch.threadgroup_bytes <= 32768, "at most 32 KB of threadgroup memory");
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
