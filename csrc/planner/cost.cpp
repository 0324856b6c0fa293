#include "cost.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan_parts.h"
#include "weight_format.h"

namespace marlin {

namespace {

// Smallest dispatch, and a barrier between two, as measured on an M1 under Linux: upper bounds for Metal.
constexpr double kLaunchSeconds = 2.5e-6;
constexpr double kBarrierSeconds = 0.8e-6;
// PyTorch's dense product goes through MPSGraph: its launch on an M1 Pro, its part of the peak on an M1 (4096^3, fp16).
constexpr double kDenseLaunchSeconds = 20e-6;
constexpr double kDenseFraction = 0.88;
// Part of the system-level cache that a tensor may fill and still be there when it is read again.
constexpr double kCachedFraction = 0.5;
// Bytes from that cache in bytes of memory.
constexpr double kCacheCost = 0.5;
// Part of the shorter of memory and compute that the longer does not hide: an assumption, which makes plans with more
// simdgroups win where memory bounds both.
constexpr double kOverlapLoss = 0.05;
// Above this ratio of the busiest core's time to that of evenly spread instructions, it is idling that bounds.
constexpr double kWaiting = 1.25;

// One product kernel of a plan.
struct Product {
  const Dispatch& dispatch;
  const GemmParams& params;
  TileShape tile;
  uint32_t row_blocks, column_blocks;

  Product(const Dispatch& dispatch, TileShape shape)
      : dispatch(dispatch), params(std::get<GemmParams>(dispatch.params)), tile(shape) {
    if (splits_k_between_simdgroups()) tile.M = static_cast<uint32_t>(dispatch.constants[kConstantRows]);
    row_blocks = is("gemm_striped") ? ceil_divide(params.M, tile.M) : is("gemv") ? dispatch.grid.x : dispatch.grid.y;
    column_blocks = ceil_divide(params.N, tile.N);
  }

  bool is(std::string_view family) const { return info(dispatch.kernel).name.starts_with(family); }
  bool splits_k_between_simdgroups() const { return is("gemv") || is("gemm_fused"); }
  uint32_t rows() const { return std::min(row_blocks * tile.M, params.M - params.m_begin); }
};

// What a simdgroup of a product does.
struct Work {
  uint32_t steps;
  uint32_t outer;  // rounds of the loop around the steps
  bool waits;      // for its own loads, instead of fetching a step ahead
};

Work work_of(const Product& product, const KernelCounts& counts) {
  const GemmParams& params = product.params;
  const uint32_t k = std::min(params.k_per_slice, params.K);
  const uint32_t steps = ceil_divide(k, product.tile.K);
  if (product.splits_k_between_simdgroups()) {
    const uint32_t chain = std::min<uint32_t>(params.group_size, kChainLength);
    return {steps, ceil_divide(k, counts.outer_k != 0 ? counts.outer_k : chain), true};
  }
  if (product.is("gemm_striped")) {
    const uint32_t slices = stripe_slices(params.K, params.k_per_slice);
    const uint32_t units = ceil_divide(product.row_blocks * product.column_blocks * slices, product.dispatch.grid.x);
    return {units * ceil_divide(ceil_divide(params.K, slices), product.tile.K), units, false};
  }
  return {steps, 0, !product.is("gemm_double_buffered")};
}

double matrix_clocks(const Product& product, const GemmProblem& problem, const GpuFamily& family) {
  const bool halves = !product.is("gemm_fused") && problem.activations == ElementType::float16;
  return (halves ? family.matrix_clocks_fp16 : family.matrix_clocks_fp32).value;
}

double weight_bytes(const WeightProblem& weight) {
  const WeightFormatInfo& format = info(weight.format);
  double per_group = format.scale_coding == ScaleCoding::floating ? element_bytes(weight.scales) : 1;
  if (format.zeros_role != ZerosRole::none) per_group += element_bytes(weight.zeros);
  const double groups = ceil_divide(weight.K, group_size(weight));
  return 0.5 * weight.K * weight.N + groups * weight.N * per_group + (weight.has_perm ? 4.0 * weight.K : 0);
}

double partial_bytes(const Plan& plan) {
  return 4.0 * plan.partials.x * plan.partials.y * plan.partials.z;
}

double output_bytes(const GemmProblem& problem, uint32_t rows) {
  return double(rows) * problem.weight.N * element_bytes(problem.activations);
}

// Whether what was written or read once is still in the system-level cache.
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

// Traffic of a tensor that is read so many times over; what the system-level cache still holds comes at twice the rate.
double reads(double bytes, uint32_t times, const Chip& chip) {
  return bytes * (1 + (times - 1) * (stays(bytes, chip) ? kCacheCost : 1));
}

// Threadgroups run row block by row block, so that each reads all weights again; gemv's go down the rows first and find
// them in L2; stripes go down the columns of tiles, where it is the activations that come again.
void add_traffic(DispatchCost& cost, const Product& product, const Plan& plan, const GemmProblem& problem,
                 const Chip& chip) {
  const double weights = weight_bytes(problem.weight);
  const double activations = double(product.rows()) * problem.weight.K * element_bytes(problem.activations);
  const double written = plan.partials.z != 0 ? partial_bytes(plan) : output_bytes(problem, product.rows());
  const bool by_columns = product.is("gemm_striped");
  cost.dram_bytes = reads(weights, by_columns || product.is("gemv") ? 1 : product.row_blocks, chip) +
                    reads(activations, by_columns ? product.column_blocks : 1, chip) + written;
  cost.l2_bytes = product.row_blocks * weights + product.column_blocks * activations + written;
}

DispatchCost product_cost(const Product& product, const Plan& plan, const GemmProblem& problem,
                          const GpuDevice& device) {
  const Dispatch& dispatch = product.dispatch;
  const KernelCounts& counts = counts_of(dispatch.kernel, problem.weight.format, product.tile);
  const Chip& chip = *device.chip;
  const GpuFamily& family = family_of(chip);
  const uint32_t simdgroups = dispatch.threads.x / kSimdWidth;
  const uint64_t threadgroups = uint64_t{dispatch.grid.x} * dispatch.grid.y * dispatch.grid.z;

  DispatchCost cost{.kernel = info(dispatch.kernel).name};
  cost.occupancy = occupancy(dispatch.threads.x, counts.half_registers, dispatch.threadgroup_bytes, family);
  cost.launch_seconds = kLaunchSeconds;
  const double resident = uint64_t{device.cores} * cost.occupancy.threadgroups;
  cost.waves = threadgroups / resident;
  add_traffic(cost, product, plan, problem, chip);

  // One simdgroup's clocks, then those of all of them on all schedulers.
  const Work work = work_of(product, counts);
  const double steps = work.steps;
  const double issue = steps * counts.step.issue + double(work.outer) * counts.outer_issue + counts.fixed_issue;
  const double complex = steps * counts.step.complex;
  const double products = steps * counts.step.matrix;
  const double matrix = products * matrix_clocks(product, problem, family);
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
  const uint64_t on_a_core = (threadgroups + device.cores - 1) / device.cores;
  const uint64_t most = cost.occupancy.threadgroups;
  cost.compute_seconds = (on_a_core / most * wave(most) + wave(on_a_core % most)) / hertz;
  finish(cost, device);
  return cost;
}

// Kernels of a thread per element: memory and launch are all that counts.
DispatchCost elementwise_cost(const Dispatch& dispatch, double read, double written, const GpuDevice& device) {
  DispatchCost cost{.kernel = info(dispatch.kernel).name};
  const uint32_t threads = dispatch.threads.x * dispatch.threads.y;
  cost.occupancy = occupancy(threads, 1, 0, family_of(*device.chip));
  cost.launch_seconds = kLaunchSeconds;
  cost.waves = double(dispatch.grid.x) * dispatch.grid.y * dispatch.grid.z /
               (uint64_t{device.cores} * cost.occupancy.threadgroups);
  cost.dram_bytes = read + written;
  cost.l2_bytes = read + written;
  finish(cost, device);
  return cost;
}

DispatchCost reduce_cost(const Dispatch& dispatch, const Plan& plan, const GemmProblem& problem,
                         const GpuDevice& device) {
  const double read = partial_bytes(plan);
  DispatchCost cost = elementwise_cost(dispatch, read, output_bytes(problem, problem.M), device);
  if (!stays(read, *device.chip)) return cost;
  cost.dram_bytes -= read;
  finish(cost, device);
  return cost;
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

DispatchCost dispatch_cost(const Dispatch& dispatch, const Candidate& candidate, const GemmProblem& problem,
                           const GpuDevice& device) {
  if (std::holds_alternative<GemmParams>(dispatch.params)) {
    return product_cost(Product(dispatch, candidate.tile), candidate.plan, problem, device);
  }
  if (std::holds_alternative<DequantizeParams>(dispatch.params)) {
    const WeightProblem& weight = problem.weight;
    const double written = double(weight.K) * weight.N * element_bytes(problem.activations);
    return elementwise_cost(dispatch, weight_bytes(weight), written, device);
  }
  return reduce_cost(dispatch, candidate.plan, problem, device);
}

}  // namespace

const KernelCounts& counts_of(Kernel kernel, WeightFormat format, const TileShape& tile) {
  const KernelCounts* counts = find_counts(info(kernel).name, format, tile);
  if (counts != nullptr) return *counts;
  throw std::logic_error("cost: no instruction counts of " + host_name(kernel, format, ElementType::float16) +
                         " for a tile of " + name(tile));
}

uint32_t largest_threadgroup(uint32_t half_registers) {
  // Mesa's table for the M1, by the most half-registers of each row.
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

PlanCost cost(const Candidate& candidate, const GemmProblem& problem, const GpuDevice& device) {
  PlanCost total;
  for (const Dispatch& dispatch : candidate.plan.dispatches) {
    DispatchCost& part = total.dispatches.emplace_back(dispatch_cost(dispatch, candidate, problem, device));
    if (total.dispatches.size() == 1) continue;
    part.launch_seconds += kBarrierSeconds;
    part.seconds += kBarrierSeconds;
  }
  if (candidate.plan.dense_product) total.dispatches.push_back(dense_cost(problem, device));
  for (const DispatchCost& dispatch : total.dispatches)
    total.seconds += dispatch.seconds;
  return total;
}

}  // namespace marlin
