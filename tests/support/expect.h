// Checks for the C++ tests. They are counted, and a failed check is printed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace marlin::test {

inline int64_t checks = 0;
inline int64_t failures = 0;
inline std::string subject;  // describes the input of the following checks; printed with each failure

// `what` is a text or a function that returns a text. The function is only called if the check fails, because some
// tests run millions of checks.
template <class What>
void expect(bool condition, What&& what) {
  constexpr int kMaxPrinted = 20;
  ++checks;
  if (condition || ++failures > kMaxPrinted) return;
  std::string text;
  if constexpr (std::is_invocable_v<What>) {
    text = what();
  } else {
    text = what;
  }
  std::printf("FAILED %s\n", text.c_str());
  if (!subject.empty()) std::printf("  in %s\n", subject.c_str());
}

// Returns the exit status for main.
inline int report() {
  std::printf("%lld checks, %lld failed\n", static_cast<long long>(checks), static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}

struct NamedCase {
  std::string_view name;
  void (*run)();
};

// Runs all cases, or only the case that the first argument names. Prints a line for each case, and then the report.
inline int run_cases(std::initializer_list<NamedCase> cases, int argc, char** argv) {
  bool found = false;
  for (const NamedCase& test : cases) {
    if (argc > 1 && test.name != argv[1]) continue;
    found = true;
    subject.clear();
    const int64_t checks_before = checks, failures_before = failures;
    try {
      test.run();
    } catch (const std::exception& error) {
      expect(false, std::string(test.name) + ": " + error.what());
    }
    expect(checks > checks_before, "this case checks something");
    std::printf("%.*s: %lld checks, %lld failures\n", static_cast<int>(test.name.size()), test.name.data(),
                static_cast<long long>(checks - checks_before), static_cast<long long>(failures - failures_before));
  }
  expect(found, [&] { return std::string("no case '") + argv[1] + "'"; });
  return report();
}

}  // namespace marlin::test
