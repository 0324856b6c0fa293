// Which instruction-set family the CPU kernels use, and why.
#pragma once

#include <string>
#include <vector>

namespace marlin::cpu {

enum class Isa : int { portable, avx2, avx512, amx, neon };

struct Capability {
  Isa isa;                            // the family that the kernels use
  std::string reason;                 // one sentence: detected, or forced by TORCH_MARLIN_METAL_CPU_ISA
  std::vector<std::string> features;  // the CPU features that kernels can use and that the OS has enabled
  std::vector<Isa> available;         // families that can be forced on this machine
};

// The machine's features, regardless of TORCH_MARLIN_METAL_CPU_ISA.
struct Detected {
  std::vector<std::string> features;
  std::vector<Isa> available{Isa::portable};  // from the slowest to the fastest
  bool fast_bf16_dot = false;                 // bf16 dot products are faster than fp32 multiply-adds
  bool byte_dot = false;                      // the CPU has integer dot products of bytes
  bool byte_matrix = false;                   // the CPU has integer products of small matrices of bytes
};

const Detected& detected();

// Returns the capability, which is decided once per process. Throws std::runtime_error if TORCH_MARLIN_METAL_CPU_ISA
// names an unknown family, or one that this machine lacks.
const Capability& capability();

const char* isa_name(Isa isa);

}  // namespace marlin::cpu
