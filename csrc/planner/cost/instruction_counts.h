// benchmarks/metal/kernel_counts.py --write makes the table in this file.
// The table says how many instructions a simdgroup of each kernel executes. They are counted in code compiled for the
// M1's GPU (-O1; fp16 activations, aligned tensors, no options). The counts are static: an instruction that only some
// steps execute, such as one at the end of a group in a staged kernel, is counted in every step.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/shared/kernel_list.h"

namespace marlin {

// What one simdgroup uses. `issue` is the number of issue slots of a scheduler. `complex` is the number of clocks of
// the unit for slow integer and complex instructions, which runs beside the scheduler. `matrix` is the number of 8x8x8
// products.
struct InstructionCounts {
  uint32_t issue, complex, matrix;
};

// A simdgroup executes `step` for each step along K. It also executes `outer_issue` instructions each time it has
// passed outer_k elements of K. If outer_k is 0, it executes them at the end of every group or chain (gemv) or of
// every slice (striped).
struct KernelCounts {
  Kernel kernel;
  WeightFormat format;  // the counts are also used for formats with the same code kind that have no row
  TileShape tile;
  InstructionCounts step;
  uint32_t outer_issue;
  uint32_t outer_k;
  uint32_t fixed_issue;  // executed once, outside all loops
  uint32_t half_registers;
  uint32_t waits = 0;  // how often a step waits for loads
};

inline constexpr std::array kKernelCounts{
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {1, 128, 16}, {118, 32, 0}, 110, 0, 139, 93, 3},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {1, 128, 16}, {166, 96, 0}, 55, 0, 137, 83, 3},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {1, 128, 16}, {278, 192, 0}, 51, 0, 145, 127, 4},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {2, 128, 16}, {191, 32, 0}, 204, 0, 149, 127, 3},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {2, 128, 16}, {235, 96, 0}, 75, 0, 151, 119, 3},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {2, 128, 16}, {345, 192, 0}, 65, 0, 159, 135, 6},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {3, 128, 16}, {256, 32, 0}, 258, 0, 159, 159, 3},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {3, 128, 16}, {306, 96, 0}, 95, 0, 157, 135, 3},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {3, 128, 16}, {412, 192, 0}, 79, 0, 169, 151, 8},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {4, 128, 16}, {321, 32, 0}, 328, 0, 169, 181, 4},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {4, 128, 16}, {369, 96, 0}, 111, 0, 171, 155, 4},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {4, 128, 16}, {479, 192, 0}, 93, 0, 179, 167, 10},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {5, 128, 16}, {402, 96, 0}, 338, 0, 179, 159, 12},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {5, 128, 16}, {434, 96, 0}, 127, 0, 177, 159, 12},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {5, 128, 16}, {546, 192, 0}, 107, 0, 189, 183, 12},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {6, 128, 16}, {469, 96, 0}, 398, 0, 188, 175, 14},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {6, 128, 16}, {509, 96, 0}, 149, 0, 187, 159, 14},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {6, 128, 16}, {613, 192, 0}, 121, 0, 199, 191, 14},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {7, 128, 16}, {538, 96, 0}, 458, 0, 199, 183, 16},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {7, 128, 16}, {570, 96, 0}, 163, 0, 197, 183, 16},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {7, 128, 16}, {680, 192, 0}, 135, 0, 209, 207, 16},
    KernelCounts{Kernel::gemv, WeightFormat::uint4b8, {8, 128, 16}, {603, 96, 0}, 518, 0, 209, 199, 18},
    KernelCounts{Kernel::gemv, WeightFormat::float4_e2m1, {8, 128, 16}, {635, 96, 0}, 181, 0, 211, 199, 18},
    KernelCounts{Kernel::gemv, WeightFormat::lut4, {8, 128, 16}, {747, 192, 0}, 149, 0, 219, 223, 18},
    KernelCounts{Kernel::gemm_fused, WeightFormat::uint4b8, {8, 32, 64}, {158, 32, 32}, 71, 256, 212, 111, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::float4_e2m1, {8, 32, 64}, {194, 96, 32}, 71, 256, 212, 103, 6},
    KernelCounts{Kernel::gemm_fused, WeightFormat::lut4, {8, 32, 64}, {302, 192, 32}, 70, 256, 211, 99, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::uint4b8, {16, 32, 64}, {199, 32, 64}, 101, 256, 220, 135, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::float4_e2m1, {16, 32, 64}, {222, 96, 64}, 101, 256, 220, 135, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::lut4, {16, 32, 64}, {338, 192, 64}, 110, 256, 215, 127, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::uint4b8, {24, 32, 64}, {208, 32, 96}, 131, 256, 228, 175, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::float4_e2m1, {24, 32, 64}, {281, 96, 96}, 131, 256, 228, 159, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::lut4, {24, 32, 64}, {372, 192, 96}, 144, 256, 219, 159, 4},
    KernelCounts{Kernel::gemm_fused, WeightFormat::uint4b8, {32, 32, 64}, {246, 96, 128}, 163, 256, 236, 199, 5},
    KernelCounts{Kernel::gemm_fused, WeightFormat::float4_e2m1, {32, 32, 64}, {274, 96, 128}, 163, 256, 236, 199, 5},
    KernelCounts{Kernel::gemm_fused, WeightFormat::lut4, {32, 32, 64}, {424, 192, 128}, 180, 256, 226, 183, 5},
    KernelCounts{Kernel::moe_gemv, WeightFormat::uint4b8, {1, 128, 16}, {118, 32, 0}, 111, 0, 251, 97, 3},
    KernelCounts{Kernel::moe_gemv, WeightFormat::float4_e2m1, {1, 128, 16}, {166, 96, 0}, 56, 0, 250, 87, 3},
    KernelCounts{Kernel::moe_gemv, WeightFormat::lut4, {1, 128, 16}, {278, 192, 0}, 52, 0, 259, 127, 4},
    KernelCounts{Kernel::moe_gemv_reduce, WeightFormat::uint4b8, {1, 128, 16}, {124, 32, 0}, 117, 0, 293, 103, 3},
    KernelCounts{Kernel::moe_gemv_reduce, WeightFormat::float4_e2m1, {1, 128, 16}, {166, 96, 0}, 54, 0, 292, 95, 3},
    KernelCounts{Kernel::moe_gemv_reduce, WeightFormat::lut4, {1, 128, 16}, {278, 192, 0}, 50, 0, 300, 135, 4},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::uint4b8, {1, 128, 16}, {118, 36, 0}, 107, 0, 272, 109, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::float4_e2m1, {1, 128, 16}, {166, 100, 0}, 54, 0, 271, 99, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::lut4, {1, 128, 16}, {278, 196, 0}, 48, 0, 280, 143, 4},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::uint4b8, {2, 128, 16}, {190, 36, 0}, 181, 0, 302, 143, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::float4_e2m1, {2, 128, 16}, {235, 100, 0}, 74, 0, 301, 135, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::lut4, {2, 128, 16}, {345, 196, 0}, 62, 0, 310, 151, 6},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::uint4b8, {3, 128, 16}, {254, 36, 0}, 253, 0, 330, 177, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::float4_e2m1, {3, 128, 16}, {302, 100, 0}, 92, 0, 329, 157, 3},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::lut4, {3, 128, 16}, {412, 196, 0}, 76, 0, 339, 167, 8},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::uint4b8, {4, 128, 16}, {321, 36, 0}, 325, 0, 360, 197, 4},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::float4_e2m1, {4, 128, 16}, {369, 100, 0}, 110, 0, 359, 171, 4},
    KernelCounts{Kernel::moe_gemv_blocks, WeightFormat::lut4, {4, 128, 16}, {479, 196, 0}, 90, 0, 368, 183, 10},
    KernelCounts{Kernel::moe_fused, WeightFormat::uint4b8, {8, 32, 64}, {159, 32, 32}, 47, 256, 318, 127, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::float4_e2m1, {8, 32, 64}, {195, 96, 32}, 47, 256, 318, 123, 5},
    KernelCounts{Kernel::moe_fused, WeightFormat::lut4, {8, 32, 64}, {306, 192, 32}, 46, 256, 317, 111, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::uint4b8, {16, 32, 64}, {179, 32, 64}, 102, 256, 368, 159, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::float4_e2m1, {16, 32, 64}, {215, 96, 64}, 102, 256, 368, 151, 5},
    KernelCounts{Kernel::moe_fused, WeightFormat::lut4, {16, 32, 64}, {337, 192, 64}, 108, 256, 363, 143, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::uint4b8, {24, 32, 64}, {218, 32, 96}, 129, 256, 418, 183, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::float4_e2m1, {24, 32, 64}, {235, 96, 96}, 129, 256, 418, 183, 5},
    KernelCounts{Kernel::moe_fused, WeightFormat::lut4, {24, 32, 64}, {346, 192, 96}, 124, 256, 409, 183, 4},
    KernelCounts{Kernel::moe_fused, WeightFormat::uint4b8, {32, 32, 64}, {267, 96, 128}, 161, 256, 469, 207, 5},
    KernelCounts{Kernel::moe_fused, WeightFormat::float4_e2m1, {32, 32, 64}, {298, 96, 128}, 161, 256, 469, 207, 5},
    KernelCounts{Kernel::moe_fused, WeightFormat::lut4, {32, 32, 64}, {399, 192, 128}, 170, 256, 455, 207, 5},
    KernelCounts{
        Kernel::gemm_double_buffered_64x64x32, WeightFormat::uint4b8, {64, 64, 32}, {452, 80, 32}, 0, 0, 485, 159, 3},
    KernelCounts{Kernel::gemm_double_buffered_64x64x32,
                 WeightFormat::float4_e2m1,
                 {64, 64, 32},
                 {450, 88, 32},
                 0,
                 0,
                 483,
                 159,
                 3},
    KernelCounts{
        Kernel::gemm_double_buffered_64x64x32, WeightFormat::lut4, {64, 64, 32}, {560, 144, 32}, 0, 0, 498, 171, 3},
    KernelCounts{
        Kernel::gemm_single_stage_64x64x32, WeightFormat::uint4b8, {64, 64, 32}, {473, 96, 32}, 0, 0, 352, 127, 4},
    KernelCounts{
        Kernel::gemm_single_stage_64x64x32, WeightFormat::float4_e2m1, {64, 64, 32}, {471, 104, 32}, 0, 0, 352, 127, 4},
    KernelCounts{
        Kernel::gemm_single_stage_64x64x32, WeightFormat::lut4, {64, 64, 32}, {586, 156, 32}, 0, 0, 367, 135, 4},
    KernelCounts{Kernel::gemm_double_buffered_32x128x32,
                 WeightFormat::uint4b8,
                 {32, 128, 32},
                 {532, 108, 32},
                 0,
                 0,
                 568,
                 165,
                 5},
    KernelCounts{Kernel::gemm_double_buffered_32x128x32,
                 WeightFormat::float4_e2m1,
                 {32, 128, 32},
                 {527, 124, 32},
                 0,
                 0,
                 562,
                 163,
                 5},
    KernelCounts{
        Kernel::gemm_double_buffered_32x128x32, WeightFormat::lut4, {32, 128, 32}, {647, 172, 32}, 0, 0, 582, 179, 5},
    KernelCounts{
        Kernel::gemm_single_stage_32x128x32, WeightFormat::uint4b8, {32, 128, 32}, {574, 124, 32}, 0, 0, 352, 127, 5},
    KernelCounts{Kernel::gemm_single_stage_32x128x32,
                 WeightFormat::float4_e2m1,
                 {32, 128, 32},
                 {551, 140, 32},
                 0,
                 0,
                 352,
                 127,
                 5},
    KernelCounts{
        Kernel::gemm_single_stage_32x128x32, WeightFormat::lut4, {32, 128, 32}, {669, 184, 32}, 0, 0, 367, 135, 5},
    KernelCounts{
        Kernel::gemm_double_buffered_128x64x16, WeightFormat::uint4b8, {128, 64, 16}, {362, 84, 32}, 0, 0, 753, 211, 3},
    KernelCounts{Kernel::gemm_double_buffered_128x64x16,
                 WeightFormat::float4_e2m1,
                 {128, 64, 16},
                 {360, 92, 32},
                 0,
                 0,
                 751,
                 211,
                 3},
    KernelCounts{
        Kernel::gemm_double_buffered_128x64x16, WeightFormat::lut4, {128, 64, 16}, {461, 148, 32}, 0, 0, 767, 227, 3},
    KernelCounts{
        Kernel::gemm_single_stage_128x64x16, WeightFormat::uint4b8, {128, 64, 16}, {382, 100, 32}, 0, 0, 626, 191, 4},
    KernelCounts{Kernel::gemm_single_stage_128x64x16,
                 WeightFormat::float4_e2m1,
                 {128, 64, 16},
                 {380, 108, 32},
                 0,
                 0,
                 626,
                 191,
                 4},
    KernelCounts{
        Kernel::gemm_single_stage_128x64x16, WeightFormat::lut4, {128, 64, 16}, {478, 160, 32}, 0, 0, 641, 203, 4},
    KernelCounts{Kernel::gemm_double_buffered_128x128x16,
                 WeightFormat::uint4b8,
                 {128, 128, 16},
                 {385, 92, 32},
                 0,
                 0,
                 770,
                 207,
                 4},
    KernelCounts{Kernel::gemm_double_buffered_128x128x16,
                 WeightFormat::float4_e2m1,
                 {128, 128, 16},
                 {383, 100, 32},
                 0,
                 0,
                 768,
                 207,
                 4},
    // The offline compiler fails on this kernel; single_stage's counts are used.
    KernelCounts{
        Kernel::gemm_double_buffered_128x128x16, WeightFormat::lut4, {128, 128, 16}, {494, 164, 32}, 0, 0, 641, 203, 4},
    KernelCounts{
        Kernel::gemm_single_stage_128x128x16, WeightFormat::uint4b8, {128, 128, 16}, {398, 104, 32}, 0, 0, 626, 191, 4},
    KernelCounts{Kernel::gemm_single_stage_128x128x16,
                 WeightFormat::float4_e2m1,
                 {128, 128, 16},
                 {396, 112, 32},
                 0,
                 0,
                 626,
                 191,
                 4},
    KernelCounts{
        Kernel::gemm_single_stage_128x128x16, WeightFormat::lut4, {128, 128, 16}, {494, 164, 32}, 0, 0, 641, 203, 4},
    KernelCounts{Kernel::gemm_striped_64x64x32, WeightFormat::uint4b8, {64, 64, 32}, {449, 80, 32}, 518, 0, 30, 175, 3},
    KernelCounts{
        Kernel::gemm_striped_64x64x32, WeightFormat::float4_e2m1, {64, 64, 32}, {447, 88, 32}, 516, 0, 30, 175, 3},
    KernelCounts{Kernel::gemm_striped_64x64x32, WeightFormat::lut4, {64, 64, 32}, {573, 144, 32}, 517, 0, 45, 183, 3},
    KernelCounts{
        Kernel::gemm_striped_32x128x32, WeightFormat::uint4b8, {32, 128, 32}, {519, 108, 32}, 586, 0, 30, 179, 4},
    KernelCounts{
        Kernel::gemm_striped_32x128x32, WeightFormat::float4_e2m1, {32, 128, 32}, {515, 124, 32}, 582, 0, 30, 179, 4},
    KernelCounts{Kernel::gemm_striped_32x128x32, WeightFormat::lut4, {32, 128, 32}, {634, 172, 32}, 585, 0, 45, 191, 4},
};

// Returns the row of the format, or else of another format with the same code kind; null if there is none.
template <size_t Rows>
constexpr const KernelCounts* find_counts(const std::array<KernelCounts, Rows>& table, Kernel kernel,
                                          WeightFormat format, const TileShape& tile) {
  const KernelCounts* found = nullptr;
  for (const KernelCounts& row : table) {
    if (row.kernel != kernel || code_kind(row.format) != code_kind(format) || row.tile != tile) continue;
    if (row.format == format) return &row;
    if (found == nullptr) found = &row;
  }
  return found;
}

// How often a step waits for memory, and how often for a cache. gemv waits for memory once if it loads a step's words
// first, and twice otherwise. fused waits for memory twice. Their other waits are for activations. The kernels for
// experts have the same loops. The tool counts no waits of gemm_tensor. The staged kernels load ahead, so kernel_cost()
// does not add their wait to their instructions. Waits at the end of a group or chain are not counted.
struct StepWaits {
  uint32_t dram, cache;
};

constexpr StepWaits waits_of(const KernelCounts& counts) {
  const bool is_gemv = counts.kernel == Kernel::gemv || counts.kernel == Kernel::moe_gemv ||
                       counts.kernel == Kernel::moe_gemv_reduce || counts.kernel == Kernel::moe_gemv_blocks;
  if (is_gemv) {
    const uint32_t dram = gemv_loads_first(code_kind(counts.format), counts.tile.M) ? 1 : 2;
    return {dram, counts.waits - dram};
  }
  if (counts.kernel == Kernel::gemm_fused || counts.kernel == Kernel::moe_fused) return {2, counts.waits - 2};
  if (counts.kernel == Kernel::gemm_tensor) return {1, 1};
  return {1, 0};
}

}  // namespace marlin
