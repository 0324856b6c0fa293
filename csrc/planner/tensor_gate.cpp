#include "csrc/planner/tensor_gate.h"

namespace marlin {

namespace {

std::string text(const Version& version) {
  return std::to_string(version.major) + "." + std::to_string(version.minor);
}

// macOS 26 reports version 16 to a program that was linked with the SDK of macOS 15 or an older one (cpython issue
// 135675, dotnet/runtime pull request 116536). This program is usually the Python interpreter.
Version real(Version macos) {
  if (macos.major == 16) macos.major = 26;
  return macos;
}

}  // namespace

std::string tensor_refusal(const MetalSystem& system) {
  const MetalSystem& oldest = kTensorSystem;
  if (system.family < oldest.family) {
    const std::string found = system.family == 0 ? "no Apple family" : "family Apple" + std::to_string(system.family);
    return "tensor units came with the M5 (GPU family Apple" + std::to_string(oldest.family) +
           "), and this GPU is of " + found;
  }
  if (const Version macos = real(system.macos); macos < oldest.macos)
    return "it needs macOS " + text(oldest.macos) + ", and this is macOS " + text(macos);
  if (system.language < oldest.language) {
    return "it needs version " + text(oldest.language) + " of Metal's language, and this build of the package has " +
           text(system.language);
  }
  return "";
}

}  // namespace marlin
