#include "csrc/planner/cost/experts_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/core/math.h"

namespace marlin {

namespace {

// A probability below this does not change an expected value.
constexpr double kNegligible = 1e-12;
// A sum of probabilities may exceed a whole number by less than this fraction, because its terms are rounded.
constexpr double kRounding = 1e-9;
// Above this exponent, exp(-x) and the probabilities that are computed from it are too small for a double.
constexpr double kLargestExponent = 600;

// What a simdgroup of moe_sort executes for 32 pairs, which it reads twice, and once for each kMoeSortThreads experts.
// Counted by benchmarks/agx/agxstat.py, --O1.
constexpr double kSortIssue = 616;
constexpr double kSortComplex = 24;
constexpr double kSortWaits = 9;
constexpr double kSortPassIssue = 283;
constexpr uint32_t kSortHalfRegisters = 111;

// What a simdgroup of moe_gemv_reduce executes for one more slice of its slot, and for one more slot. Counted in the
// same way.
constexpr double kSliceIssue = 13;
constexpr double kSlotIssue = 10;

DispatchCost sort_cost(const MoeProblem& problem, const GpuDevice& device) {
  const double passes = ceil_divide(problem.experts + 1, uint32_t{kMoeSortThreads});
  const double batches = ceil_divide(problem.product.M, uint32_t{kMoeSortThreads});
  const double ids = double(problem.product.M) * (problem.wide_ids ? 8 : 4);
  KernelLoad load{.threadgroups = 1,
                  .threads = kMoeSortThreads,
                  .half_registers = kSortHalfRegisters,
                  .threadgroup_bytes = kMoeSortBytes};
  load.issue = passes * (batches * kSortIssue + kSortPassIssue);
  load.complex = passes * batches * kSortComplex;
  load.dram_waits = batches;
  load.cache_waits = passes * batches * kSortWaits - batches;
  load.dram_bytes = ids + 4.0 * problem.product.M;
  load.l2_bytes = 2 * passes * ids + 4.0 * problem.product.M;
  DispatchCost cost = kernel_cost(load, device);
  cost.kernel = info(Kernel::moe_sort).name;
  return cost;
}

// Returns the number of rows that is the unit of a block's time: the kernels have a loop for each multiple of it.
uint32_t unit_rows(const Tiling& tiling) {
  switch (tiling.variant) {
    case GemmVariant::gemv:
      return 1;
    case GemmVariant::fused:
      return kBlock;
    default:
      return tiling.tile.M;
  }
}

// Returns the load of the blocks, with the averages of what their simdgroups execute. A block that is not full takes
// less time.
KernelLoad average_load(const Tiling& tiling, const GemmProblem& product, const Routing& routing,
                        const GpuDevice& device) {
  KernelLoad average = product_load(tiling, product, {0, tiling.tile.M, 1}, device);
  const uint32_t unit = unit_rows(tiling);
  if (unit == tiling.tile.M) return average;
  average.issue = average.complex = average.matrix_operations = average.dram_waits = average.cache_waits = 0;
  for (uint32_t rows = unit; rows <= tiling.tile.M; rows += unit) {
    const auto last = routing.blocks_by_rows.begin() + rows;
    const double share = std::accumulate(last - unit, last, 0.0) / routing.blocks;
    const KernelLoad load = product_load(tiling, product, {0, rows, 1}, device);
    average.issue += share * load.issue;
    average.complex += share * load.complex;
    average.matrix_operations += share * load.matrix_operations;
    average.dram_waits += share * load.dram_waits;
    average.cache_waits += share * load.cache_waits;
  }
  return average;
}

double written_bytes(const Tiling& tiling, const MoeProblem& problem) {
  const GemmProblem& product = problem.product;
  const double row =
      double(product.weight.N) * (combines(tiling, problem) ? sizeof(float) : element_bytes(product.activations));
  return row * (tiling.kernel == Kernel::moe_gemv_reduce ? token_count(problem) : product.M);
}

// Sets what is different in moe_gemv_reduce: a threadgroup computes all slots of a token, waits for row weights and
// biases, and adds the slots. The table's counts contain the addition of one slice and of one slot.
void add_slots(KernelLoad& load, const Tiling& tiling, const MoeProblem& problem) {
  const uint32_t slices = tiling.simdgroups / problem.top_k;
  load.threadgroups = uint64_t{token_count(problem)} * ceil_divide(problem.product.weight.N, tiling.tile.N);
  load.issue += (slices - 1) * kSliceIssue + (problem.top_k - 1) * kSlotIssue;
  load.dram_waits += problem.has_row_weights || problem.product.has_bias ? 1 : 0;
}

DispatchCost products_cost(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const WeightProblem& weight = product.weight;
  const bool is_gemv = tiling.variant == GemmVariant::gemv;
  const Routing routing = expected_routing(token_count(problem), problem.top_k, problem.experts, tiling.tile.M);
  const double columns = ceil_divide(weight.N, tiling.tile.N);

  KernelLoad load = average_load(tiling, product, routing, device);
  load.threadgroups = static_cast<uint64_t>(std::ceil(routing.blocks * (1 - kRounding)) * columns);
  if (tiling.kernel == Kernel::moe_gemv_reduce) add_slots(load, tiling, problem);
  load.weight_bytes = routing.experts * weight_bytes(weight);
  const double rows = double(product.M) * weight.K * element_bytes(product.activations);
  const double distinct = problem.a_slot_stride == 0 ? rows / problem.top_k : rows;
  const double written = written_bytes(tiling, problem);
  // The blocks of an expert are next to each other. Between two of them, the threadgroups read one expert's weight.
  // gemv starts all rows of some columns before those of the next columns, so L2 serves all but the first row.
  const double times = is_gemv ? 1 : std::max(1.0, routing.blocks / routing.experts);
  load.dram_bytes = routing.experts * reads(weight_bytes(weight), times, *device.chip) +
                    reads(distinct, rows / distinct, *device.chip) + written;
  load.l2_bytes = routing.blocks * weight_bytes(weight) + columns * rows + written;
  DispatchCost cost = kernel_cost(load, device);
  cost.kernel = info(tiling.kernel).name;
  return cost;
}

DispatchCost combine_cost(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const uint32_t rows = problem.reduce ? token_count(problem) : product.M;
  const double products = 4.0 * product.M * product.weight.N;
  const double read = stays(products, *device.chip) ? 0 : products;
  const double written = double(rows) * product.weight.N * element_bytes(product.activations);
  return elementwise_cost(Kernel::moe_reduce, elementwise_grid(product.weight.N, rows), read, written, product, device);
}

}  // namespace

Routing expected_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows) {
  const double chosen = std::min(1.0, double(top_k) / experts);
  const double mean = double(tokens) * top_k / experts;
  Routing routing{.blocks_by_rows = std::vector<double>(block_rows)};
  // Adds the blocks of a number of experts that have so many rows each.
  const auto add = [&](double count, uint32_t rows) {
    if (rows == 0) return;
    routing.experts += count;
    routing.blocks += count * ceil_divide(rows, block_rows);
    routing.blocks_by_rows[block_rows - 1] += count * ((rows - 1) / block_rows);
    routing.blocks_by_rows[(rows - 1) % block_rows] += count;
  };
  // The number of an expert's rows has a binomial distribution.
  const double exponent = chosen == 1 ? 0 : -double(tokens) * std::log1p(-chosen);
  if (chosen == 1) {
    add(experts, static_cast<uint32_t>(std::ceil(mean)));
  } else if (exponent > kLargestExponent) {
    // The last block has each number of rows equally often.
    const double others = experts * (mean / block_rows - 0.5 * (1 + 1.0 / block_rows));
    for (uint32_t rows = 1; rows <= block_rows; ++rows)
      add(double(experts) / block_rows, rows);
    routing.blocks += others;
    routing.blocks_by_rows[block_rows - 1] += others;
  } else {
    double probability = std::exp(-exponent);
    for (uint32_t rows = 0; rows <= tokens && (rows < mean || probability > kNegligible); ++rows) {
      add(experts * probability, rows);
      probability *= (tokens - rows) / (rows + 1.0) * chosen / (1 - chosen);
    }
  }
  return routing;
}

PlanCost experts_cost(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device) {
  PlanCost total;
  if (sorts_pairs(tiling)) total.dispatches.push_back(sort_cost(problem, device));
  total.dispatches.push_back(products_cost(tiling, problem, device));
  if (combines(tiling, problem)) total.dispatches.push_back(combine_cost(problem, device));
  for (const DispatchCost& part : total.dispatches)
    total.seconds += part.seconds;
  return total;
}

}  // namespace marlin
