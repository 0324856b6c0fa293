// Which instruction-set family the CPU kernels use, and why.
#pragma once

#include <string>
#include <vector>

namespace marlin::cpu {

enum class Isa : int { portable, avx2, avx512, amx, neon };

struct Capability {
  Isa isa;                            // what the kernels use
  std::string reason;                 // one sentence: detected, forced by TORCH_MARLIN_METAL_CPU_ISA, ...
  std::vector<std::string> features;  // CPU features that kernels look at and that the OS has enabled
  std::vector<Isa> available;         // families that can be forced on this machine
};

// What the machine has, whatever the environment asks for.
struct Detected {
  std::vector<std::string> features;
  std::vector<Isa> available{Isa::portable};  // the last is the best
  bool fast_bf16_dot = false;                 // bf16 dot products at more than the fp32 rate
  bool byte_dot = false;                      // integer dot products of bytes
};

const Detected& detected();

// Read once. Throws std::runtime_error when TORCH_MARLIN_METAL_CPU_ISA names a family that is unknown or absent here.
const Capability& capability();

const char* isa_name(Isa isa);

}  // namespace marlin::cpu
