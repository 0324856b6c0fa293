// The table by which the planner chooses between gemv, fused and tensor, their blocks of rows and how they split K:
// decision_rows.h.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "csrc/core/gemm_variants.h"
#include "csrc/planner/chips.h"

namespace marlin {

// How a GPU computes with activations of a type. M1 and M2 compute bfloat with integer instructions; later chips
// compute it as fast as fp16. The decode to bfloat operands of tensor units takes more instructions than that to half.
enum class Arithmetic : uint8_t { half, emulated_bfloat, single, bfloat_operands };

// What a block of rows costs a simdgroup of a kernel, in clocks of its scheduler, without matrix products. The unit of
// rows is one row in gemv, and eight rows in fused. A simdgroup of tensor computes 32 rows, of any number; its units
// are the products of 16 k of a step, and unit_end is for the sums of activations, which weights with biases need.
struct Decision {
  Arithmetic arithmetic;
  CodeKind codes;
  uint32_t code_bits;
  GemmVariant kernel;
  double decode, unit;           // for each step along K: to decode its weights, and for each unit of rows
  double group_end, unit_end;    // at the end of each group of at most kChainLength k, and for each unit of rows there
  std::array<uint16_t, 8> wait;  // by units: clocks that it waits for the loads of a step
  std::string_view reason;
};

// The 16-bit registers of a thread of a kernel by units, and of its forms for experts in the order of their tiles
// (csrc/planner/variants.cpp), which in tensor need as many. The compiler's choice of registers follows no rule, and a
// few more can halve the threadgroups on a core, so they are not a kind's average. A format without a row has those of
// the first row of its kind.
struct Registers {
  Arithmetic arithmetic;
  CodeKind codes;
  uint32_t code_bits;
  ZerosRole zeros;
  ScaleCoding scales;
  uint32_t levels;  // of the scales
  GemmVariant kernel;
  std::array<uint8_t, 8> product;
  std::array<uint8_t, 4> experts;
};

// The registers of a kernel without decisions, with the format that needs the most.
struct KernelRegisters {
  Kernel kernel;
  uint32_t half_registers;
};

#include "csrc/planner/decision_rows.h"

// Returns true if the kernel decodes weights to bfloat operands for bfloat activations, as those of tensor units do.
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

// Returns the row for a kernel and a format with the fewest differences. Other codes count more than other arithmetic,
// then another width, other levels of scales, and other zeros or scales.
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

// A row with the kernel and other codes is never the nearest if there is one with the same codes.
static_assert(
    [] {
      for (int32_t format = 0; format < kWeightFormatCount; ++format) {
        for (size_t i = 0; i < kDecisions.size(); ++i) {
          const GemmVariant kernel = kDecisions[i].kernel;
          if (i > 0 && kDecisions[i - 1].kernel == kernel)
            continue;  // compilers limit the steps of a constant expression
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
