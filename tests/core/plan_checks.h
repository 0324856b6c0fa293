// What the planner's tests count with: checks, failures, and what is being looked at.
#pragma once

#include <cstdint>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>

inline int checks = 0;
inline int failures = 0;
inline std::string subject;

inline void expect(bool condition, const std::string& what) {
  ++checks;
  if (condition) return;
  ++failures;
  std::printf("FAILED %s\n  in %s\n", what.c_str(), subject.c_str());
}

// The planner refuses what the body asks for.
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

// `blocks` blocks of `length` tile [0, size): all of it, and none of them empty.
inline void expect_tiling(uint64_t blocks, uint64_t length, uint64_t size, const std::string& what) {
  expect(blocks * length >= size, what + " covered");
  expect((blocks - 1) * length < size, what + ": no empty block");
}

template <typename T>
std::string text(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

// Prints "<checks> checks, <failures> failed"; returns main's result.
inline int finish() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
