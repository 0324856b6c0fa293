#include "csrc/planner/variants.h"

#include <array>

namespace marlin {

namespace {

constexpr GemmTile gemv_tile(uint32_t rows, Kernel kernel = Kernel::gemv) {
  return {GemmVariant::gemv, kernel, {rows, kGemvColumns, kGemvK}, 0};
}
constexpr std::array kGemvTiles{gemv_tile(1), gemv_tile(2), gemv_tile(3), gemv_tile(4),
                                gemv_tile(5), gemv_tile(6), gemv_tile(7), gemv_tile(8)};
static_assert(kGemvTiles.size() == kGemvMaxRows, "every number of rows that the kernel has");
constexpr std::array kGemvExpertTiles{gemv_tile(1, Kernel::moe_gemv), gemv_tile(1, Kernel::moe_gemv_reduce),
                                      gemv_tile(kMoeGemvRows, Kernel::moe_gemv_blocks)};

constexpr GemmTile fused_tile(uint32_t rows, Kernel kernel = Kernel::gemm_fused) {
  return {GemmVariant::fused, kernel, {rows, kFusedColumns, kFusedK}, 0};
}
constexpr std::array kFusedTiles{fused_tile(32), fused_tile(24), fused_tile(16), fused_tile(8)};
static_assert(kFusedTiles.front().tile.M == kFusedMaxRows, "every number of rows that the kernel has");
constexpr std::array kFusedExpertTiles{fused_tile(32, Kernel::moe_fused), fused_tile(24, Kernel::moe_fused),
                                       fused_tile(16, Kernel::moe_fused), fused_tile(8, Kernel::moe_fused)};

#define MARLIN_STAGED_TILE(M, N, K, variant, stages) \
  GemmTile{GemmVariant::variant, Kernel::gemm_##variant##_##M##x##N##x##K, {M, N, K}, stages},
constexpr std::array kDoubleBufferedTiles{MARLIN_TILES(MARLIN_STAGED_TILE, double_buffered, 2)};
constexpr std::array kSingleStageTiles{MARLIN_TILES(MARLIN_STAGED_TILE, single_stage, 1)};
constexpr std::array kStripedTiles{MARLIN_STRIPED_TILES(MARLIN_STAGED_TILE, striped, 2)};
#undef MARLIN_STAGED_TILE

#define MARLIN_TENSOR_TILE(M, N, K) GemmTile{GemmVariant::tensor, Kernel::gemm_tensor, {M, N, K}, 0},
constexpr std::array kTensorTiles{MARLIN_TENSOR_TILES(MARLIN_TENSOR_TILE)};
#undef MARLIN_TENSOR_TILE
#define MARLIN_TENSOR_TILE(M, N, K) GemmTile{GemmVariant::tensor, Kernel::moe_tensor, {M, N, K}, 0},
constexpr std::array kTensorExpertTiles{MARLIN_TENSOR_TILES(MARLIN_TENSOR_TILE)};
#undef MARLIN_TENSOR_TILE

std::string tensor_units_refusal(const GemmProblem& problem, const GpuDevice& device) {
  if (!device.tensor_units) return "one that this GPU can run (" + tensor_refusal(device.system) + ")";
  if (has_tensor_kernel(problem.weight.format, problem.activations)) return "";
  return "one that multiplies " + std::string(name(problem.activations)) + " activations by " +
         std::string(name(problem.weight.format)) +
         " weights (tensor units multiply float16 and bfloat16 activations by weights without a lut)";
}

// For up to eight rows, tensor is not faster than gemv and fused by the model of lab/, because a simdgroup of tensor
// always computes 32 rows.
bool has_rows_for_tensor(const GemmProblem& problem, const GpuDevice& /*device*/) {
  return problem.M > kBlock;
}

bool may_decode(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const uint64_t limit = problem.variant.is_rounded() ? device.decodes.rounded : device.decodes.automatic;
  return uint64_t{weight.K} * weight.N * element_bytes(problem.activations) <= limit;
}

constexpr std::array kTwoPassTiles{GemmTile{GemmVariant::two_pass, Kernel::dequantize, {0, 0, 0}, 0}};

}  // namespace

// Row blocks of all sizes are candidates. Smaller blocks use more cores if there are few columns. A block with more
// rows than the problem can still be the fastest, because its kernel may keep more simdgroups resident.
constinit const VariantRules gemv_variant{
    .tiles = kGemvTiles,
    .expert_tiles = kGemvExpertTiles,
    .min_slice = 64,
    .most_simdgroups = kGemvMaxSimdgroups,
    .sums_bytes = gemv_threadgroup_bytes,
    .most_automatic_rows = 24,  // with more rows, fused is at least as fast by the model of lab/
    .has_rows_along_x = true,   // threadgroups that read the same weights start side by side
    .simdgroup_columns = kGemvColumns,
    .row_unit = 1,
};
// fewest_slices is 4, because threadgroups of two simdgroups reached only two thirds of the matrix rate of larger ones
// (the mlx-omarchy project, measured on M1).
constinit const VariantRules fused_variant{
    .tiles = kFusedTiles,
    .expert_tiles = kFusedExpertTiles,
    .min_slice = kFusedK,
    .fewest_slices = 4,
    .slices_hold_groups = false,
    .most_simdgroups = kFusedMaxSimdgroups,
    .sums_bytes = fused_threadgroup_bytes,
    .row_multiple = kBlock,
    .has_rest_blocks = true,
    .has_32_bit_offsets = true,
    .simdgroup_columns = kFusedColumns,
    .row_unit = kBlock,
};
constinit const VariantRules double_buffered_variant{.tiles = kDoubleBufferedTiles, .threads = tile_threads};
constinit const VariantRules single_stage_variant{.tiles = kSingleStageTiles, .threads = tile_threads};
constinit const VariantRules striped_variant{.tiles = kStripedTiles, .threads = tile_threads, .has_stripes = true};
constinit const VariantRules tensor_variant{
    .tiles = kTensorTiles,
    .expert_tiles = kTensorExpertTiles,
    .threads = tensor_threads,
    .refusal = tensor_units_refusal,
    .row_multiple = kTensorRows,
    .simdgroup_columns = kTensorColumns,
    .row_unit = kTensorRows,
    .is_automatic = has_rows_for_tensor,
};
constinit const VariantRules two_pass_variant{
    .tiles = kTwoPassTiles,
    .rounds_weight = true,
    .is_automatic = may_decode,
    .reason =
        "variant 'rounded' or TORCH_MARLIN_METAL_DECODE_MB allows it: decodes the weight once for all rows, rounded",
};

const VariantRules& rules_of(GemmVariant variant) {
#define MARLIN_VARIANT_RULES(name) &name##_variant,
  static constexpr std::array<const VariantRules*, kGemmVariants.size()> rules{
      MARLIN_GEMM_VARIANTS(MARLIN_VARIANT_RULES)};
#undef MARLIN_VARIANT_RULES
  return *rules.at(static_cast<size_t>(variant));
}

std::span<const GemmTile> gemm_tiles() {
  static const std::vector<GemmTile> tiles = [] {
    std::vector<GemmTile> all;
    for (size_t i = 0; i < kGemmVariants.size(); ++i) {
      const auto own = rules_of(static_cast<GemmVariant>(i)).tiles;
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }();
  return tiles;
}

bool is_automatic(GemmVariant variant, const GemmProblem& problem, const GpuDevice& device) {
  const VariantRules& rules = rules_of(variant);
  return rules.is_automatic != nullptr ? rules.is_automatic(problem, device) : rules.row_unit != 0;
}

bool rounds_weight(GemmVariant variant) {
  return rules_of(variant).rounds_weight;
}

bool computes_experts(GemmVariant variant) {
  return !rules_of(variant).expert_tiles.empty();
}

std::string expert_variants() {
  std::string text = "auto";
  std::string_view last;
  for (size_t i = 0; i < kGemmVariants.size(); ++i) {
    if (!computes_experts(static_cast<GemmVariant>(i))) continue;
    if (!last.empty()) text.append(", ").append(last);
    last = kGemmVariants.at(i);
  }
  return text.append(" or ").append(last);
}

uint32_t threadgroup_bytes(const Tiling& tiling, const GemmProblem& problem, uint32_t rows) {
  if (tiling.stages != 0) return tile_threadgroup_bytes(tiling.tile, problem.activations, tiling.stages);
  const auto bytes = rules_of(tiling.variant).sums_bytes;
  return bytes == nullptr ? 0 : bytes(problem.weight.format, rows, tiling.simdgroups);
}

}  // namespace marlin
