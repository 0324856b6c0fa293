// The Metal libraries' source text. Defined in a file that the build writes from kernels/ (build_support).
#pragma once

#include <span>
#include <string_view>

namespace marlin::mps {

struct KernelSource {
  std::string_view library;  // kernels/<library>.metal
  const char* text;          // ASCII, zero-terminated, headers inlined
};

std::span<const KernelSource> kernel_sources();

}  // namespace marlin::mps
