// The table by which the planner chooses between gemv and fused, their blocks of rows and how they split K:
// decision_rows.h.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "csrc/core/gemm_variants.h"
#include "csrc/planner/chips.h"

namespace marlin {

// How a GPU computes with activations of a type. M1 and M2 compute bfloat with integer instructions; later chips
// compute it as fast as fp16.
enum class Arithmetic : uint8_t { half, emulated_bfloat, single };

constexpr Arithmetic arithmetic(ElementType activations, const GpuFamily& family) {
  if (activations == ElementType::float32) return Arithmetic::single;
  return activations == ElementType::bfloat16 && !family.has_bfloat ? Arithmetic::emulated_bfloat : Arithmetic::half;
}

// What a block of rows costs a simdgroup of a kernel, in clocks of its scheduler, without matrix products. The unit of
// rows is one row in gemv, and eight rows in fused.
struct Decision {
  Arithmetic arithmetic;
  CodeKind codes;
  uint32_t code_bits;
  GemmVariant kernel;
  double decode, unit;           // for each step along K: to decode its weights, and for each unit of rows
  double group_end, unit_end;    // at the end of each group of at most kChainLength k, and for each unit of rows there
  std::array<uint16_t, 8> wait;  // by units: clocks that it waits for the loads of a step
  std::array<uint8_t, 8> half_registers;     // by units: 16-bit registers of a thread
  std::array<uint8_t, 4> experts_registers;  // the same of its forms for experts
  std::string_view reason;
};

// The registers of a kernel without decisions, with the format that needs the most.
struct KernelRegisters {
  Kernel kernel;
  uint32_t half_registers;
};

#include "csrc/planner/decision_rows.h"

// Returns the row for a kernel and a format: of the formats with such codes, the one whose width is nearest. E4M3 codes
// have no rows of their own yet, and take those of integers.
constexpr const Decision* find_decision(GemmVariant kernel, Arithmetic arithmetic, WeightFormat format) {
  const Decision* found = nullptr;
  const auto distance = [&](const Decision& row) {
    return std::max(row.code_bits, code_bits(format)) - std::min(row.code_bits, code_bits(format));
  };
  const CodeKind codes = code_kind(format) == CodeKind::e4m3 ? CodeKind::integer : code_kind(format);
  for (const Decision& row : kDecisions) {
    if (row.kernel != kernel || row.arithmetic != arithmetic || row.codes != codes) continue;
    if (found == nullptr || distance(row) < distance(*found)) found = &row;
  }
  return found;
}

static_assert(
    [] {
      for (int32_t format = 0; format < kWeightFormatCount; ++format) {
        for (const Decision& row : kDecisions) {
          if (find_decision(row.kernel, row.arithmetic, static_cast<WeightFormat>(format)) == nullptr) return false;
        }
      }
      return true;
    }(),
    "a kind of codes without decisions: python -m lab.decisions --write");

constexpr uint32_t registers_of(Kernel kernel) {
  for (const KernelRegisters& row : kKernelRegisters) {
    if (row.kernel == kernel) return row.half_registers;
  }
  return 0;
}

}  // namespace marlin
