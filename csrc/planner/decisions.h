// Types of the cost tables with which the planner chooses the kernel (gemv, fused or tensor), its row block and the
// split of K. decision_rows.h contains the tables' entries.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "csrc/core/gemm_variants.h"
#include "csrc/planner/chips.h"

namespace marlin {

// How a GPU computes with one type of activations. M1 and M2 compute bfloat with integer instructions; later chips
// compute bfloat as fast as fp16. For tensor units, a decode to bfloat operands takes more instructions than a decode
// to half.
enum class Arithmetic : uint8_t { half, emulated_bfloat, single, bfloat_operands };

// The clocks of the scheduler that a kernel needs for one simdgroup's row block, without the matrix products. They grow
// with the number of units in the block. A unit is one row in gemv and eight rows in fused. In tensor, where a
// simdgroup always computes 32 rows, a unit is one product of 16 k. There unit_end is the cost of the sums of
// activations, which weights with biases need.
struct Decision {
  Arithmetic arithmetic;
  CodeKind codes;
  uint32_t code_bits;
  GemmVariant kernel;
  double decode, unit;         // in each step along K: `decode` once, for the step's weights, and `unit` for each unit
  double group_end, unit_end;  // at the end of a group or of kChainLength k: `group_end` once, `unit_end` for each unit
  std::array<uint16_t, 8> wait;  // by number of units: clocks that a simdgroup waits for the loads of a step
  std::string_view reason;
};

// The 16-bit registers per thread of a kernel: `product` by number of units, `experts` for moe_gemm in the order of its
// tiles (csrc/planner/variants.cpp). In tensor, both need the same number. Each row counts a single format, because the
// compiler's choice follows no rule and a few more registers can halve the threadgroups on a core. A format without a
// row uses the first row of its code kind.
struct Registers {
  Arithmetic arithmetic;
  CodeKind codes;
  uint32_t code_bits;
  ZerosRole zeros;
  ScaleCoding scales;
  uint32_t levels;  // the levels of scales, 1 or 2
  GemmVariant kernel;
  std::array<uint8_t, 8> product;
  std::array<uint8_t, 4> experts;
};

// The 16-bit registers of a kernel that has no Decision, measured with the format that needs the most.
struct KernelRegisters {
  Kernel kernel;
  uint32_t half_registers;
};

#include "csrc/planner/decision_rows.h"

// Returns true if the kernel decodes weights to bfloat operands when the activations are bfloat, as tensor does.
constexpr bool has_operands_of_bfloat(GemmVariant kernel) {
  return std::any_of(kDecisions.begin(), kDecisions.end(), [&](const Decision& row) {
    return row.kernel == kernel && row.arithmetic == Arithmetic::bfloat_operands;
  });
}

constexpr Arithmetic arithmetic(GemmVariant kernel, ElementType activations, const GpuFamily& family) {
  if (activations == ElementType::float32) return Arithmetic::single;
  if (activations != ElementType::bfloat16) return Arithmetic::half;
  if (has_operands_of_bfloat(kernel)) return Arithmetic::bfloat_operands;
  return family.has_bfloat ? Arithmetic::half : Arithmetic::emulated_bfloat;
}

// Returns the kernel's row with the fewest differences from the arguments. A difference in code kind weighs most, then
// arithmetic, width, levels of scales, and the types of zeros or scales.
template <typename Rows>
constexpr auto nearest(const Rows& rows, GemmVariant kernel, Arithmetic arithmetic, WeightFormat format,
                       uint32_t levels = 1) -> decltype(rows.data()) {
  decltype(rows.data()) found = nullptr;
  const auto differences = [&](const auto& row) {
    const uint32_t bits = code_bits(format);
    uint32_t sum = (row.codes != code_kind(format) ? 128 : 0) + (row.arithmetic != arithmetic ? 64 : 0) +
                   8 * (std::max(row.code_bits, bits) - std::min(row.code_bits, bits));
    if constexpr (requires { row.zeros; })
      sum += (row.levels != levels ? 4 : 0) + (row.zeros != zeros_role(format) ? 1 : 0) +
             (row.scales != scale_coding(format) ? 1 : 0);
    return sum;
  };
  for (const auto& row : rows) {
    if (row.kernel != kernel) continue;
    if (found == nullptr || differences(row) < differences(*found)) found = &row;
  }
  return found;
}

constexpr const Decision* find_decision(GemmVariant kernel, Arithmetic arithmetic, WeightFormat format) {
  return nearest(kDecisions, kernel, arithmetic, format);
}

// For each kernel and format there is a row with the format's code kind, so nearest() returns no other code kind.
static_assert(
    [] {
      for (int32_t format = 0; format < kWeightFormatCount; ++format) {
        for (size_t i = 0; i < kDecisions.size(); ++i) {
          const GemmVariant kernel = kDecisions[i].kernel;
          if (i > 0 && kDecisions[i - 1].kernel == kernel)
            continue;  // repeated kernel: skipped, because compilers limit the steps of a constant expression
          if (has_operands_of_bfloat(kernel) && code_kind(static_cast<WeightFormat>(format)) == CodeKind::table)
            continue;  // tensor units have no kernel for tables
          bool found = false;
          for (const Decision& row : kDecisions)
            found = found || (row.kernel == kernel && row.codes == code_kind(static_cast<WeightFormat>(format)));
          if (!found) return false;
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
