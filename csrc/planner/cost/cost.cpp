#include "csrc/planner/cost/cost.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/core/weight_format.h"
#include "csrc/planner/cost/tensor_counts.h"

namespace marlin {

namespace {

// PyTorch computes a dense product through MPSGraph. The launch time was measured on an M1 Pro. The fraction of the
// peak rate that the product reaches was measured on an M1 (4096^3, fp16).
constexpr double kDenseLaunchSeconds = 20e-6;
constexpr double kDenseFraction = 0.88;

// One launch of a tiling's product kernel.
struct Product {
  const Tiling& tiling;
  const GemmProblem& problem;
  TileShape tile;  // the tiling's tile, but with M = the rows per threadgroup of this launch
  uint32_t m_begin, row_blocks, column_blocks;

  Product(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks)
      : tiling(tiling),
        problem(problem),
        tile{blocks.rows, tiling.tile.N, tiling.tile.K},
        m_begin(blocks.m_begin),
        row_blocks(blocks.count),
        column_blocks(ceil_divide(problem.weight.N, tile.N)) {}

  // With groups of 16, gemm_tensor takes half steps, because each product of 16 k has a scale of its own.
  uint32_t step_k() const {
    const WeightProblem& weight = problem.weight;
    const bool halves = is(GemmVariant::tensor) && !tensor_scales_codes(weight.format) &&
                        group_size(weight) == kMinGroupSize && weight.K > kMinGroupSize;
    return halves ? tile.K / 2 : tile.K;
  }
  bool is(GemmVariant variant) const { return tiling.variant == variant; }
  uint32_t rows() const { return std::min(row_blocks * tile.M, problem.M - m_begin); }
  uint64_t threadgroups() const {
    return is(GemmVariant::striped) ? tiling.stripes : uint64_t{row_blocks} * column_blocks * tiling.splits;
  }
};

// The steps of one simdgroup along K, and the iterations of the loop around them.
struct Steps {
  uint32_t inner, outer;
};

Steps steps_of(const Product& product, const KernelCounts& counts) {
  const uint32_t K = product.problem.weight.K;
  const uint32_t k = std::min(product.tiling.k_per_slice, K);
  const uint32_t steps = ceil_divide(k, product.step_k());
  if (product.is(GemmVariant::gemv) || product.is(GemmVariant::fused)) {
    const uint32_t chain = std::min<uint32_t>(group_size(product.problem.weight), kChainLength);
    return {steps, ceil_divide(k, counts.outer_k != 0 ? counts.outer_k : chain)};
  }
  if (product.is(GemmVariant::tensor)) {
    const uint32_t chain = tensor_scales_codes(product.problem.weight.format)
                               ? uint32_t{kChainLength}
                               : std::min<uint32_t>(group_size(product.problem.weight), kChainLength);
    return {steps, ceil_divide(k, chain)};
  }
  if (product.is(GemmVariant::striped)) {
    const uint32_t slices = stripe_slices(K, product.tiling.k_per_slice);
    const uint32_t units = ceil_divide(product.row_blocks * product.column_blocks * slices, product.tiling.stripes);
    return {units * ceil_divide(ceil_divide(K, slices), product.tile.K), units};
  }
  return {steps, 0};
}

// Returns the number of 8x8x8 products in a step. If zero points are not in the codes, gemm_tensor also needs the
// sums of the activations, which adds half as many products again.
double step_products(const Product& product, const KernelCounts& counts) {
  if (!product.is(GemmVariant::tensor)) return counts.step.matrix;
  const WeightProblem& weight = product.problem.weight;
  const ZerosRole role = zeros_role(weight.format);
  const bool sums_activations =
      role == ZerosRole::bias || (role == ZerosRole::zero_point && weight.zeros != ElementType::uint8);
  return counts.step.matrix * double(product.step_k()) / product.tile.K * (sums_activations ? 1.5 : 1);
}

double matrix_clocks(const Product& product, const GpuFamily& family) {
  if (product.is(GemmVariant::tensor)) {
    // A plan made on an M5 may be for an older chip, named by TORCH_MARLIN_METAL_GPU, that has no tensor units. The
    // rate of the newest family is then used.
    const GpuFamily& units = family.tensor_clocks_fp16.value > 0 ? family : kGpuFamilies.back();
    return units.tensor_clocks_fp16.value;
  }
  const bool halves = !product.is(GemmVariant::fused) && product.problem.activations == ElementType::float16;
  return (halves ? family.matrix_clocks_fp16 : family.matrix_clocks_fp32).value;
}

double partial_bytes(const Tiling& tiling, const GemmProblem& problem) {
  const Extent floats = partials(tiling, problem);
  return 4.0 * floats.x * floats.y * floats.z;
}

double output_bytes(const GemmProblem& problem, uint32_t rows) {
  return double(rows) * problem.weight.N * element_bytes(problem.activations);
}

// Threadgroups run row block by row block, so each row block reads all weights again. In gemv, threadgroups that share
// weights run at the same time, so L2 serves all but the first. Stripes go down the columns of tiles, so each column
// reads all activations again.
void add_traffic(KernelLoad& load, const Product& product, const Chip& chip) {
  const GemmProblem& problem = product.problem;
  load.weight_bytes = weight_bytes(problem.weight);
  const double activations = double(product.rows()) * problem.weight.K * element_bytes(problem.activations);
  const double written =
      writes_partials(product.tiling) ? partial_bytes(product.tiling, problem) : output_bytes(problem, product.rows());
  const bool by_columns = product.is(GemmVariant::striped);
  const bool reads_weights_once = by_columns || product.is(GemmVariant::gemv);
  load.dram_bytes = reads(load.weight_bytes, reads_weights_once ? 1 : product.row_blocks, chip) +
                    reads(activations, by_columns ? product.column_blocks : 1, chip) + written;
  load.l2_bytes = product.row_blocks * load.weight_bytes + product.column_blocks * activations + written;
}

KernelLoad load_of(const Product& product, const GpuDevice& device) {
  const Tiling& tiling = product.tiling;
  const GemmTile row{tiling.variant, tiling.kernel, product.tile, tiling.stages};
  const KernelCounts& counts = counts_of(row, product.problem, family_of(*device.chip));
  const Steps steps = steps_of(product, counts);
  KernelLoad load{.threadgroups = product.threadgroups(),
                  .threads = tiling.simdgroups * kSimdWidth,
                  .half_registers = counts.half_registers,
                  .threadgroup_bytes = threadgroup_bytes(tiling, product.problem, product.tile.M),
                  .loads_ahead = product.is(GemmVariant::double_buffered) || product.is(GemmVariant::striped)};
  load.issue = double(steps.inner) * counts.step.issue + double(steps.outer) * counts.outer_issue + counts.fixed_issue;
  load.complex = double(steps.inner) * counts.step.complex;
  load.matrix_operations = double(steps.inner) * step_products(product, counts);
  load.matrix_clocks = matrix_clocks(product, family_of(*device.chip));
  load.dram_waits = double(steps.inner) * waits_of(counts).dram;
  load.cache_waits = double(steps.inner) * waits_of(counts).cache;
  return load;
}

DispatchCost product_cost(const Product& product, const GpuDevice& device) {
  KernelLoad load = load_of(product, device);
  add_traffic(load, product, *device.chip);
  DispatchCost cost = kernel_cost(load, device);
  cost.kernel = info(product.tiling.kernel).name;
  return cost;
}

DispatchCost reduce_cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const Kernel kernel = tiling.stripes_share_tiles ? Kernel::reduce_striped : Kernel::reduce;
  const double partial = partial_bytes(tiling, problem);
  const double read = stays(partial, *device.chip) ? 0 : partial;
  return elementwise_cost(kernel, reduction_grid(tiling, problem), read, output_bytes(problem, problem.M), problem,
                          device);
}

DispatchCost dequantize_cost(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const double written = double(weight.K) * weight.N * element_bytes(problem.activations);
  return elementwise_cost(Kernel::dequantize, elementwise_grid(weight.N, weight.K / kCodesPerWord),
                          weight_bytes(weight), written, problem, device);
}

DispatchCost dense_cost(const GemmProblem& problem, const GpuDevice& device) {
  const double M = problem.M;
  const double N = problem.weight.N;
  const double K = problem.weight.K;
  const GpuFamily& family = family_of(*device.chip);
  const Figure& flop =
      problem.activations == ElementType::float16 ? family.fp16_flop_per_clock : family.fp32_flop_per_clock;
  DispatchCost cost{.kernel = "torch.matmul"};
  cost.launch_seconds = kDenseLaunchSeconds;
  const double element = element_bytes(problem.activations);
  cost.dram_bytes = (M * K + K * N + M * N) * element;
  cost.l2_bytes = cost.dram_bytes;
  cost.compute_seconds =
      2 * M * N * K / (kDenseFraction * flop.value * device.cores * device.chip->clock_ghz.value * 1e9);
  cost.matrix_seconds = cost.compute_seconds;
  finish(cost, device.cores, K * N * element, device);
  if (cost.bound == "matrix") cost.bound = "dense";
  return cost;
}

}  // namespace

double weight_bytes(const WeightProblem& weight) {
  double per_group = has_coded_scales(weight.format) ? 1 : element_bytes(weight.scales);
  if (zeros_role(weight.format) != ZerosRole::none) per_group += element_bytes(weight.zeros);
  const double groups = ceil_divide(weight.K, group_size(weight));
  return code_bits(weight.format) / 8.0 * weight.K * weight.N + groups * weight.N * per_group +
         (weight.has_perm ? 4.0 * weight.K : 0);
}

DispatchCost elementwise_cost(Kernel kernel, Extent grid, double read, double written, const GemmProblem& problem,
                              const GpuDevice& device) {
  const uint64_t threadgroups = uint64_t{grid.x} * grid.y * grid.z;
  DispatchCost cost{.kernel = info(kernel).name};
  cost.occupancy = occupancy(kElementwiseWidth * kElementwiseHeight, 1, 0, family_of(*device.chip));
  cost.launch_seconds = kDispatchSeconds;
  cost.waves = double(threadgroups) / (double(device.cores) * cost.occupancy.threadgroups);
  cost.in_flight = simdgroups_in_flight(cost.occupancy, threadgroups, device);
  cost.dram_bytes = read + written;
  cost.l2_bytes = read + written;
  finish(cost, threadgroups, weight_bytes(problem.weight), device);
  return cost;
}

KernelLoad product_load(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks,
                        const GpuDevice& device) {
  return load_of(Product(tiling, problem, blocks), device);
}

const KernelCounts& counts_of(const GemmTile& row, const GemmProblem& problem, const GpuFamily& family) {
  const WeightFormat format = problem.weight.format;
  const KernelCounts* counts = row.variant == GemmVariant::tensor
                                   ? &tensor_counts(format, problem.activations)
                                   : find_counts(row.kernel, format, row.tile, problem.activations, family);
  if (counts != nullptr) return *counts;
  throw std::logic_error("cost: no instruction counts of " + host_name({row.kernel, format, problem.activations}) +
                         " for a tile of " + name(row.tile));
}

PlanCost cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  PlanCost total;
  total.dispatches.reserve(3);
  const auto add = [&](const DispatchCost& part) { total.dispatches.push_back(part); };
  if (tiling.variant == GemmVariant::two_pass) {
    add(dequantize_cost(problem, device));
    add(dense_cost(problem, device));
  } else {
    for (uint32_t launch = 0; launch < launches(tiling); ++launch)
      add(product_cost(Product(tiling, problem, row_blocks(tiling, problem.M, launch)), device));
    if (writes_partials(tiling)) add(reduce_cost(tiling, problem, device));
  }
  for (const DispatchCost& part : total.dispatches)
    total.seconds += part.seconds;
  return total;
}

}  // namespace marlin
