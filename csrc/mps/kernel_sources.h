// The source text of the Metal libraries. build_support/embed_kernels.py generates the definition from kernels/.
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
