// The instruction set that the CPU kernels use, and the reason for it.
#pragma once

#include <string>
#include <vector>

namespace marlin::cpu {

enum class Isa : int { portable, avx2, avx512, amx, neon };

struct Capability {
  Isa isa;                            // the instruction set that the kernels use
  std::string reason;                 // one sentence: detected, or forced by TORCH_MARLIN_METAL_CPU_ISA
  std::vector<std::string> features;  // the CPU features that kernels can use and that the OS has enabled
  std::vector<Isa> available;         // instruction sets that can be forced on this machine
};

// The machine's features, independent of TORCH_MARLIN_METAL_CPU_ISA.
struct Detected {
  std::vector<std::string> features;
  std::vector<Isa> available{Isa::portable};  // from the slowest to the fastest
  bool fast_bf16_dot = false;                 // bf16 dot products are faster than fp32 multiply-adds
  bool byte_dot = false;                      // the CPU has integer dot products of bytes
  bool byte_matrix = false;                   // the CPU has integer products of small matrices of bytes
};

const Detected& detected();

// Returns the capability, which is determined once per process. Throws std::runtime_error if the value of
// TORCH_MARLIN_METAL_CPU_ISA is unknown, or is an instruction set that this machine lacks.
const Capability& capability();

const char* isa_name(Isa isa);

}  // namespace marlin::cpu
