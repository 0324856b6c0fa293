// What the planner's tests count with: checks, failures, and what is being looked at.
#pragma once

#include <cstdio>
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

// Prints "<checks> checks, <failures> failed"; returns main's result.
inline int finish() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
