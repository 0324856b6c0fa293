#include "csrc/planner/cost.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/core/weight_format.h"

namespace marlin {

namespace {

// The time of the smallest dispatch, and of a barrier between two. Measured on an M1 under Linux, so these are upper
// bounds for Metal.
constexpr double kLaunchSeconds = 2.5e-6;
constexpr double kBarrierSeconds = 0.8e-6;
// PyTorch's dense product goes through MPSGraph. Its launch time was measured on an M1 Pro, and the fraction of the
// peak that it reaches on an M1 (4096^3, fp16).
constexpr double kDenseLaunchSeconds = 20e-6;
constexpr double kDenseFraction = 0.88;
// A tensor that fills at most this fraction of the system-level cache is still there when it is read again.
constexpr double kCachedFraction = 0.5;
// Reading a byte from that cache costs this much of reading it from memory.
constexpr double kCacheCost = 0.5;
// Of memory time and compute time, this fraction of the shorter is not hidden by the longer. It is an assumption. It
// makes the plan with more simdgroups win if memory bounds both.
constexpr double kOverlapLoss = 0.05;
// If the busiest core takes longer than this multiple of the time of evenly spread instructions, the bound is
// "occupancy".
constexpr double kWaiting = 1.25;

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

  bool is(GemmVariant variant) const { return tiling.variant == variant; }
  uint32_t rows() const { return std::min(row_blocks * tile.M, problem.M - m_begin); }
  uint64_t threadgroups() const {
    return is(GemmVariant::striped) ? tiling.stripes : uint64_t{row_blocks} * column_blocks * tiling.splits;
  }
};

// The work of one simdgroup.
struct Work {
  uint32_t steps;
  uint32_t outer;  // iterations of the loop around the steps
  bool waits;      // waits for its loads in every step, instead of fetching a step ahead
};

Work work_of(const Product& product, const KernelCounts& counts) {
  const uint32_t K = product.problem.weight.K;
  const uint32_t k = std::min(product.tiling.k_per_slice, K);
  const uint32_t steps = ceil_divide(k, product.tile.K);
  if (product.is(GemmVariant::gemv) || product.is(GemmVariant::fused)) {
    const uint32_t chain = std::min<uint32_t>(group_size(product.problem.weight), kChainLength);
    return {steps, ceil_divide(k, counts.outer_k != 0 ? counts.outer_k : chain), true};
  }
  if (product.is(GemmVariant::striped)) {
    const uint32_t slices = stripe_slices(K, product.tiling.k_per_slice);
    const uint32_t units = ceil_divide(product.row_blocks * product.column_blocks * slices, product.tiling.stripes);
    return {units * ceil_divide(ceil_divide(K, slices), product.tile.K), units, false};
  }
  return {steps, 0, product.is(GemmVariant::single_stage)};
}

double matrix_clocks(const Product& product, const GpuFamily& family) {
  const bool halves = !product.is(GemmVariant::fused) && product.problem.activations == ElementType::float16;
  return (halves ? family.matrix_clocks_fp16 : family.matrix_clocks_fp32).value;
}

double weight_bytes(const WeightProblem& weight) {
  const WeightFormatInfo& format = info(weight.format);
  double per_group = format.scale_coding == ScaleCoding::floating ? element_bytes(weight.scales) : 1;
  if (format.zeros_role != ZerosRole::none) per_group += element_bytes(weight.zeros);
  const double groups = ceil_divide(weight.K, group_size(weight));
  return 0.5 * weight.K * weight.N + groups * weight.N * per_group + (weight.has_perm ? 4.0 * weight.K : 0);
}

double partial_bytes(const Tiling& tiling, const GemmProblem& problem) {
  const Extent floats = partials(tiling, problem);
  return 4.0 * floats.x * floats.y * floats.z;
}

double output_bytes(const GemmProblem& problem, uint32_t rows) {
  return double(rows) * problem.weight.N * element_bytes(problem.activations);
}

// Returns true if `bytes` that were read or written once are still in the system-level cache.
bool stays(double bytes, const Chip& chip) {
  return bytes <= kCachedFraction * chip.slc_mb.value * 0x1p20;
}

std::string_view bound_of(const DispatchCost& cost) {
  const double longest = std::max({cost.dram_seconds, cost.l2_seconds, cost.compute_seconds});
  if (cost.launch_seconds >= longest) return "launch";
  if (cost.dram_seconds == longest) return "dram";
  if (cost.l2_seconds == longest) return "l2";
  const double alu = cost.issue_seconds + cost.matrix_seconds;
  if (cost.compute_seconds > kWaiting * std::max(alu, cost.complex_seconds)) return "occupancy";
  if (cost.complex_seconds > alu) return "complex";
  return cost.matrix_seconds > cost.issue_seconds ? "matrix" : "issue";
}

void finish(DispatchCost& cost, const GpuDevice& device) {
  const Chip& chip = *device.chip;
  const GpuFamily& family = family_of(chip);
  cost.dram_seconds = cost.dram_bytes / (dram_bytes_per_second(chip, device.cores) * chip.dram_fraction.value);
  cost.l2_seconds = cost.l2_bytes / (family.l2_bytes_per_clock.value * device.cores * chip.clock_ghz.value * 1e9);
  cost.seconds = cost.launch_seconds + std::max({cost.dram_seconds, cost.l2_seconds, cost.compute_seconds}) +
                 kOverlapLoss * std::min(cost.dram_seconds, cost.compute_seconds);
  cost.bound = bound_of(cost);
}

// Returns the cost, in bytes of memory, of reading a tensor `times` times. From the system-level cache it is read at
// twice the rate of memory.
double reads(double bytes, uint32_t times, const Chip& chip) {
  return bytes * (1 + (times - 1) * (stays(bytes, chip) ? kCacheCost : 1));
}

// Threadgroups run row block by row block, so each row block reads all weights again. In gemv, threadgroups that share
// weights run at the same time, so L2 serves all but the first. Stripes go down the columns of tiles, so each column
// reads all activations again.
void add_traffic(DispatchCost& cost, const Product& product, const Chip& chip) {
  const GemmProblem& problem = product.problem;
  const double weights = weight_bytes(problem.weight);
  const double activations = double(product.rows()) * problem.weight.K * element_bytes(problem.activations);
  const double written =
      writes_partials(product.tiling) ? partial_bytes(product.tiling, problem) : output_bytes(problem, product.rows());
  const bool by_columns = product.is(GemmVariant::striped);
  const bool reads_weights_once = by_columns || product.is(GemmVariant::gemv);
  cost.dram_bytes = reads(weights, reads_weights_once ? 1 : product.row_blocks, chip) +
                    reads(activations, by_columns ? product.column_blocks : 1, chip) + written;
  cost.l2_bytes = product.row_blocks * weights + product.column_blocks * activations + written;
}

DispatchCost product_cost(const Product& product, const GpuDevice& device) {
  const Tiling& tiling = product.tiling;
  const KernelCounts& counts = counts_of(tiling.kernel, product.problem.weight.format, product.tile);
  const Chip& chip = *device.chip;
  const GpuFamily& family = family_of(chip);
  const uint32_t simdgroups = tiling.simdgroups;
  const uint64_t threadgroups = product.threadgroups();

  DispatchCost cost{.kernel = info(tiling.kernel).name};
  cost.occupancy = occupancy(simdgroups * kSimdWidth, counts.half_registers,
                             threadgroup_bytes(tiling, product.problem, product.tile.M), family);
  cost.launch_seconds = kLaunchSeconds;
  const double resident = uint64_t{device.cores} * cost.occupancy.threadgroups;
  cost.waves = threadgroups / resident;
  add_traffic(cost, product, chip);

  // First the clocks of one simdgroup, then the time of all simdgroups on all schedulers.
  const Work work = work_of(product, counts);
  const double steps = work.steps;
  const double issue = steps * counts.step.issue + double(work.outer) * counts.outer_issue + counts.fixed_issue;
  const double complex = steps * counts.step.complex;
  const double products = steps * counts.step.matrix;
  const double matrix = products * matrix_clocks(product, family);
  const double all = double(threadgroups) * simdgroups;
  const double hertz = chip.clock_ghz.value * 1e9;
  const double rate = family.schedulers.value * device.cores * hertz;
  cost.matrix_operations = products * all;
  cost.issue_seconds = issue * all / rate;
  cost.complex_seconds = complex * all / rate;
  cost.matrix_seconds = matrix * all / rate;

  const double latency = family.dram_latency_ns.value * chip.clock_ghz.value;
  const double busy = std::max(issue + matrix, complex);
  const double alone = work.waits ? busy + (steps + 1) * latency : std::max(busy + latency, steps * latency);
  const auto wave = [&](uint64_t held) {
    return held == 0 ? 0.0 : std::max(held * simdgroups / family.schedulers.value * busy, alone);
  };
  const uint64_t on_a_core = ceil_divide(threadgroups, uint64_t{device.cores});
  const uint64_t most = cost.occupancy.threadgroups;
  cost.compute_seconds = (on_a_core / most * wave(most) + wave(on_a_core % most)) / hertz;
  finish(cost, device);
  return cost;
}

// Returns the cost of a kernel with one thread per element, which depends on memory and launch time only.
DispatchCost elementwise_cost(Kernel kernel, Extent grid, double read, double written, const GpuDevice& device) {
  DispatchCost cost{.kernel = info(kernel).name};
  cost.occupancy = occupancy(kElementwiseWidth * kElementwiseHeight, 1, 0, family_of(*device.chip));
  cost.launch_seconds = kLaunchSeconds;
  cost.waves = double(grid.x) * grid.y * grid.z / (uint64_t{device.cores} * cost.occupancy.threadgroups);
  cost.dram_bytes = read + written;
  cost.l2_bytes = read + written;
  finish(cost, device);
  return cost;
}

DispatchCost reduce_cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const Kernel kernel = tiling.stripes_share_tiles ? Kernel::reduce_striped : Kernel::reduce;
  const double read = partial_bytes(tiling, problem);
  const double written = output_bytes(problem, problem.M);
  DispatchCost cost = elementwise_cost(kernel, reduction_grid(tiling, problem), read, written, device);
  if (!stays(read, *device.chip)) return cost;
  cost.dram_bytes -= read;
  finish(cost, device);
  return cost;
}

DispatchCost dequantize_cost(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const double written = double(weight.K) * weight.N * element_bytes(problem.activations);
  return elementwise_cost(Kernel::dequantize, elementwise_grid(weight.N, weight.K / kCodesPerWord),
                          weight_bytes(weight), written, device);
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
  cost.dram_bytes = (M * K + K * N + M * N) * element_bytes(problem.activations);
  cost.l2_bytes = cost.dram_bytes;
  cost.compute_seconds =
      2 * M * N * K / (kDenseFraction * flop.value * device.cores * device.chip->clock_ghz.value * 1e9);
  cost.matrix_seconds = cost.compute_seconds;
  finish(cost, device);
  if (cost.bound == "matrix") cost.bound = "dense";
  return cost;
}

}  // namespace

const KernelCounts& counts_of(Kernel kernel, WeightFormat format, const TileShape& tile) {
  const KernelCounts* counts = find_counts(kernel, format, tile);
  if (counts != nullptr) return *counts;
  throw std::logic_error("cost: no instruction counts of " + host_name(kernel, format, ElementType::float16) +
                         " for a tile of " + name(tile));
}

uint32_t largest_threadgroup(uint32_t half_registers) {
  // Mesa's table for the M1: {half-registers per thread, at most; threads}.
  constexpr std::array<std::array<uint32_t, 2>, 10> rows{{{104, 1024},
                                                          {112, 896},
                                                          {128, 832},
                                                          {136, 768},
                                                          {144, 704},
                                                          {160, 640},
                                                          {184, 576},
                                                          {208, 512},
                                                          {232, 448},
                                                          {256, 384}}};
  const auto row = std::ranges::find_if(rows, [&](const auto& entry) { return half_registers <= entry[0]; });
  return row == rows.end() ? 0 : (*row)[1];
}

Occupancy occupancy(uint32_t threads, uint32_t half_registers, uint32_t threadgroup_bytes, const GpuFamily& family) {
  const double by_threads = family.most_threads.value / threads;
  const double by_registers = family.half_registers.value / (double(half_registers) * threads);
  const double by_memory = threadgroup_bytes == 0 ? by_threads : family.threadgroup_bytes.value / threadgroup_bytes;
  const double least = std::min({by_threads, by_registers, by_memory});
  const auto held = static_cast<uint32_t>(std::max(least, 1.0));
  return {.threadgroups = held,
          .simdgroups = held * ceil_divide(threads, kSimdWidth),
          .limit = least == by_threads     ? "threads"
                   : least == by_registers ? "registers"
                                           : "threadgroup memory"};
}

PlanCost cost(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  PlanCost total;
  total.dispatches.reserve(3);
  const auto add = [&](DispatchCost part, double barrier_seconds) {
    if (!total.dispatches.empty()) {
      part.launch_seconds += barrier_seconds;
      part.seconds += barrier_seconds;
    }
    total.dispatches.push_back(part);
  };
  if (tiling.variant == GemmVariant::two_pass) {
    add(dequantize_cost(problem, device), 0);
    add(dense_cost(problem, device), 0);
  } else {
    for (uint32_t launch = 0; launch < launches(tiling); ++launch)
      add(product_cost(Product(tiling, problem, row_blocks(tiling, problem.M, launch)), device), kBarrierSeconds);
    if (writes_partials(tiling)) add(reduce_cost(tiling, problem, device), kBarrierSeconds);
  }
  for (const DispatchCost& part : total.dispatches)
    total.seconds += part.seconds;
  return total;
}

}  // namespace marlin
