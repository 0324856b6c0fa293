// The Metal compiler's process.
#pragma once

#include <string>
#include <vector>

namespace softmetal {

// `python` runs the compiler of the folder `home`.
struct CompilerPlace {
  std::string python, home;
  bool operator==(const CompilerPlace&) const = default;
};

// What a compiler printed, and its exit status. The status is -1 if the compiler ended without one.
struct Answer {
  int status = -1;
  std::string output, errors;
};

// Runs a module of the compiler. The first argument is the module's name; the source is its standard input. Threads may
// call this function at the same time.
Answer run_compiler(const CompilerPlace& place, const std::vector<std::string>& arguments, const std::string& source);

}  // namespace softmetal
