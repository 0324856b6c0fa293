// The Metal compiler's process.
#pragma once

#include <string>
#include <vector>

namespace softmetal {

// The interpreter `python` runs the compiler in the folder `home`.
struct CompilerPlace {
  std::string python, home;
  bool operator==(const CompilerPlace&) const = default;
};

// The output of a compiler, and its exit status. If the compiler ended without a status, the status is -1.
struct Answer {
  int status = -1;
  std::string output, errors;
};

// Runs a module of the compiler. The first argument is the module's name. `source` becomes the module's standard input.
// Several threads may call this function at the same time.
Answer run_compiler(const CompilerPlace& place, const std::vector<std::string>& arguments, const std::string& source);

}  // namespace softmetal
