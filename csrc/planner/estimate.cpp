#include "csrc/planner/estimate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/core/math.h"
#include "csrc/planner/decisions.h"
#include "csrc/planner/variants.h"

namespace marlin {

namespace {

// Memory time and core time overlap. This fraction of the shorter one stays visible.
constexpr double kOverlapLoss = 0.05;
// A tensor of at most this fraction of the system-level cache is still cached when it is read again. Such a read costs
// kCacheCost times as much as a read from memory.
constexpr double kCachedFraction = 0.5;
constexpr double kCacheCost = 0.5;
// Clocks outside the loops: for gemv and fused, for tensor, and the extra clocks of kernels for experts.
constexpr double kStart = 200;
constexpr double kTensorStart = 470;
constexpr double kExpertsStart = 120;
// For kernels without rows in decision_rows.h: the issue time of other instructions, divided by the time of the matrix
// products.
constexpr double kUnlistedIssue = 0.8;
// PyTorch's dense product: its launch time in seconds, measured on an M1 Pro, and the fraction of the peak rate that it
// reaches, measured on an M1 (4096^3, fp16).
constexpr double kDenseLaunch = 20e-6;
constexpr double kDenseFraction = 0.88;
// The seconds per pair of moe_sort: one threadgroup reads all pairs twice.
constexpr double kSortSeconds = 4e-9;
// A number of blocks is a sum of rounded probabilities, so it may exceed a whole number by up to this fraction.
constexpr double kRounding = 1e-9;
// If experts have more rows than this on average, the distribution of rows no longer matters.
constexpr uint32_t kManyRows = 64;

double hertz(const GpuDevice& device) {
  return device.chip->clock_ghz.value * 1e9;
}

double together(double memory, double core, double cache = 0, double launch = kDispatchSeconds) {
  return launch + std::max({memory, core, cache}) + kOverlapLoss * std::min(memory, core);
}

// Returns the time in which the cores of a launch load and store `bytes`, if L2 serves most of them.
double cache_seconds(double bytes, uint64_t threadgroups, const GpuDevice& device) {
  const double cores = static_cast<double>(std::min<uint64_t>(threadgroups, device.cores));
  return bytes / (family_of(*device.chip).l2_bytes_per_clock.value * cores * hertz(device));
}

bool stays(double bytes, const Chip& chip) {
  return bytes <= kCachedFraction * chip.slc_mb.value * 0x1p20;
}

// Returns the bytes from memory if a tensor is read `times` times: a cached read counts as kCacheCost of its bytes.
double reads(double bytes, double times, const Chip& chip) {
  return bytes * (1 + (times - 1) * (stays(bytes, chip) ? kCacheCost : 1));
}

double output_bytes(const GemmProblem& problem, uint32_t rows) {
  return double(rows) * problem.weight.N * element_bytes(problem.activations);
}

double partial_bytes(const Tiling& tiling, const GemmProblem& problem) {
  const Extent floats = partials(tiling, problem);
  return 4.0 * floats.x * floats.y * floats.z;
}

// Returns the time of a kernel that adds partial sums. Partial sums that fit in the cache are not read from memory.
double reduction_seconds(double partial, double written, double weight_bytes, const GpuDevice& device) {
  const double read = stays(partial, *device.chip) ? 0 : partial;
  return kDispatchSeconds + memory_seconds(read + written, weight_bytes, device);
}

// Returns the clocks of the family's tensor units. If the family has none, returns the newest family's clocks, because
// a caller may request the plan of a tensor-unit kernel for any chip.
const Figure& tensor_clocks(const GpuFamily& family) {
  return family.tensor_clocks_fp16.value > 0 ? family.tensor_clocks_fp16 : kGpuFamilies.back().tensor_clocks_fp16;
}

bool has_two_levels(const WeightProblem& weight) {
  return !has_coded_scales(weight.format) && is_integer(weight.scales);
}

// Returns the length of one step of gemm_tensor along K. In groups of 16, each product of 16 k has its own scale.
uint32_t tensor_step(const WeightProblem& weight) {
  const bool halves = !tensor_scales_codes(weight.format) && group_size(weight) == kMinGroupSize;
  return halves ? kTensorK / 2 : kTensorK;
}

// Returns true if gemm_tensor must sum the activations, because its codes do not include the zero points.
bool sums_activations(const WeightProblem& weight) {
  const ZerosRole role = zeros_role(weight.format);
  return role == ZerosRole::bias || (role == ZerosRole::zero_point && !is_integer(weight.zeros));
}

// Returns the length of K that one simdgroup passes. In striped, the stripes share the K of all tiles equally.
double k_of_simdgroup(const Tiling& tiling, const GemmProblem& problem) {
  const uint32_t K = problem.weight.K;
  return tiling.stripes == 0 ? std::min(tiling.k_per_slice, K)
                             : double(tile_count(tiling.tile, problem)) * K / tiling.stripes;
}

// The time of the core with the most threadgroups, and the average number of simdgroups that a core holds.
struct Core {
  double seconds, in_flight;
};

// Returns the cost of a launch of equal threadgroups. Each has `rows` rows, of which `used` have work on average. A
// core computes its threadgroups in rounds of as many as it can hold. The last round may hold fewer, and takes at least
// the time of one simdgroup alone.
Core busiest_core(const Tiling& tiling, const GemmProblem& problem, uint64_t threadgroups, uint32_t rows, double used,
                  double more_start, const GpuDevice& device) {
  const GpuFamily& family = family_of(*device.chip);
  const WeightProblem& weight = problem.weight;
  const VariantRules& rules = rules_of(tiling.variant);
  const double k = k_of_simdgroup(tiling, problem);
  const bool on_units = needs_tensor_units(tiling.kernel);
  const uint32_t step = on_units ? tensor_step(weight) : tiling.tile.K;
  const double steps = std::ceil(k / step);
  double products = used * tiling.tile.N * step / (kBlock * kBlock * kBlock);
  if (rules.threads != nullptr) products /= tiling.simdgroups;  // the simdgroups divide the tile
  const Figure& clocks = on_units ? tensor_clocks(family) : family.matrix_clocks_fp32;
  double issue = 0;
  double wait = family.dram_latency_ns.value * device.chip->clock_ghz.value;
  if (rules.row_unit == 0) {
    issue = kUnlistedIssue * steps * products * clocks.value;  // no wait, because the staged kernels load ahead
  } else {
    const Arithmetic type = arithmetic(tiling.variant, problem.activations, family);
    const Decision& cost = *find_decision(tiling.variant, type, weight.format);
    double units = used / rules.row_unit;
    double end_units = units;
    double start = kStart + more_start;
    uint32_t group = group_size(weight);
    if (on_units) {
      start = kTensorStart + more_start;
      units = step / kMinGroupSize;
      end_units = sums_activations(weight) ? 1 : 0;
      products *= 1 + 0.5 * end_units;
      if (tensor_scales_codes(weight.format)) group = weight.K;
    }
    const double ends = std::ceil(k / std::min<uint32_t>(group, kChainLength));
    issue = steps * (cost.decode + units * cost.unit) + ends * (cost.group_end + end_units * cost.unit_end) + start;
    wait += steps * cost.wait.at(static_cast<size_t>(std::ceil(units)) - 1);
    if (rules.row_unit < kBlock) products = 0;
  }
  const double matrix = steps * products * clocks.value;
  const double busy = issue + matrix - family.matrix_overlap.value * std::min(issue, matrix);
  const uint64_t held = occupancy(tiling.simdgroups * kSimdWidth, half_registers(tiling, problem, rows, device),
                                  threadgroup_bytes(tiling, problem, rows), family)
                            .threadgroups;
  const auto round = [&](uint64_t count) {
    return count == 0 ? 0 : std::max(double(count * tiling.simdgroups) / family.schedulers.value * busy, busy + wait);
  };
  const uint64_t on_a_core = ceil_divide(threadgroups, uint64_t{device.cores});
  return {.seconds = (double(on_a_core / held) * round(held) + round(on_a_core % held)) / hertz(device),
          .in_flight = tiling.simdgroups * std::min<double>(double(held), double(threadgroups) / device.cores)};
}

// The bytes of a launch: between memory and the GPU, and between its cores and L2.
struct Traffic {
  double memory, cache;
};

// Returns the traffic of one launch of the product kernel. Each row block reads all weights again, unless the kernel
// starts threadgroups with the same weights side by side (has_rows_along_x).
Traffic product_traffic(const Tiling& tiling, const GemmProblem& problem, double times, uint32_t rows,
                        const GpuDevice& device) {
  const double written = writes_partials(tiling) ? partial_bytes(tiling, problem) : output_bytes(problem, rows);
  const double read = double(rows) * problem.weight.K * element_bytes(problem.activations);
  const double weight = weight_bytes(problem.weight);
  const uint32_t columns = ceil_divide(problem.weight.N, tiling.tile.N);
  return {.memory = reads(weight, rules_of(tiling.variant).has_rows_along_x ? 1 : times, *device.chip) + read + written,
          .cache = times * weight + columns * read + written};
}

double combine_seconds(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const uint32_t rows = problem.reduce ? token_count(problem) : product.M;
  return reduction_seconds(4.0 * product.M * product.weight.N, output_bytes(product, rows),
                           weight_bytes(product.weight), device);
}

}  // namespace

uint32_t half_registers(const GemmTile& tile, const GemmProblem& problem, uint32_t rows, const GpuDevice& device) {
  const VariantRules& rules = rules_of(tile.variant);
  if (rules.row_unit == 0) return registers_of(tile.kernel);
  const Arithmetic type = arithmetic(tile.variant, problem.activations, family_of(*device.chip));
  const WeightProblem& weight = problem.weight;
  const Registers& row = *nearest(kRegisters, tile.variant, type, weight.format, has_two_levels(weight) ? 2 : 1);
  if (needs_tensor_units(tile.kernel)) return row.product.at(tensor_step(weight) / kMinGroupSize - 1);
  for (size_t form = 0; form < rules.expert_tiles.size(); ++form) {
    const GemmTile& own = rules.expert_tiles[form];
    if (own.kernel == tile.kernel && own.tile.M == rows) return row.experts.at(form);
  }
  return row.product.at(ceil_divide(rows, rules.row_unit) - 1);
}

double Estimate::total() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

double weight_bytes(const WeightProblem& weight) {
  double per_group = has_coded_scales(weight.format) ? 1 : element_bytes(weight.scales);
  if (weight.block_scales) per_group /= double(kScaleBlock);
  if (zeros_role(weight.format) != ZerosRole::none) per_group += element_bytes(weight.zeros);
  const double groups = ceil_divide(weight.K, group_size(weight));
  const auto of_block = [&](bool has_levels) { return has_levels ? element_bytes(weight.super) : 0; };
  const double per_block = of_block(has_two_levels(weight)) +
                           of_block(zeros_role(weight.format) == ZerosRole::bias && is_integer(weight.zeros));
  return code_bits(weight.format) / 8.0 * weight.K * weight.N + groups * weight.N * per_group +
         double(ceil_divide(weight.K, kSuperBlock)) * weight.N * per_block + (weight.has_perm ? 4.0 * weight.K : 0);
}

Estimate estimate(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const double weight = weight_bytes(problem.weight);
  if (tiling.tile == TileShape{}) {  // two_pass: a kernel decodes the weight, and PyTorch multiplies
    const double written = double(problem.weight.K) * problem.weight.N * element_bytes(problem.activations);
    const GpuFamily& family = family_of(*device.chip);
    const Figure& clocked =
        problem.activations == ElementType::float16 ? family.fp16_flop_per_clock : family.fp32_flop_per_clock;
    const double rate = kDenseFraction * clocked.value * device.cores * hertz(device);
    const double flop = 2.0 * problem.M * problem.weight.N * problem.weight.K;
    const double read = double(problem.M) * problem.weight.K * element_bytes(problem.activations);
    // PyTorch adds a bias afterwards, so the result is read and written once more.
    const double results = (problem.has_bias ? 3 : 1) * output_bytes(problem, problem.M);
    const double memory = memory_seconds(written + read + results, written, device);
    return {.seconds = {traffic_seconds(weight + written, device), together(memory, flop / rate, 0, kDenseLaunch)}};
  }
  const uint32_t columns = ceil_divide(problem.weight.N, tiling.tile.N);
  Estimate found;
  for (uint32_t launch = 0; launch < launches(tiling); ++launch) {
    const RowBlocks rows = row_blocks(tiling, problem.M, launch);
    const uint64_t threadgroups = tiling.stripes != 0 ? tiling.stripes : uint64_t{rows.count} * columns * tiling.splits;
    const Core core = busiest_core(tiling, problem, threadgroups, rows.rows, rows.rows, 0, device);
    const uint32_t used = std::min(rows.count * rows.rows, problem.M - rows.m_begin);
    const Traffic bytes = product_traffic(tiling, problem, rows.count, used, device);
    found.seconds.push_back(together(memory_seconds(bytes.memory, weight, device), core.seconds,
                                     cache_seconds(bytes.cache, threadgroups, device)));
    if (launch == 0) found.in_flight = core.in_flight;
  }
  if (writes_partials(tiling)) {
    found.seconds.push_back(
        reduction_seconds(partial_bytes(tiling, problem), output_bytes(problem, problem.M), weight, device));
  }
  return found;
}

Estimate estimate(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const VariantRules& rules = rules_of(tiling.variant);
  const uint32_t tokens = token_count(problem);
  const double weight = weight_bytes(product.weight);
  const uint64_t columns = ceil_divide(product.weight.N, tiling.tile.N);
  const Routing routing = expected_routing(tokens, problem.top_k, problem.experts, tiling.tile.M);
  Estimate found;
  if (sorts_pairs(tiling)) found.seconds.push_back(kDispatchSeconds + kSortSeconds * product.M);

  const double rows = double(product.M) * product.weight.K * element_bytes(product.activations);
  const double distinct = problem.a_slot_stride == 0 ? rows / problem.top_k : rows;
  const double written = combines(tiling, problem) ? 4.0 * product.M * product.weight.N
                                                   : output_bytes(product, adds_up_tokens(tiling) ? tokens : product.M);
  // Row blocks of one expert are adjacent, so between two of them only this expert's weight is read.
  const double times = rules.has_rows_along_x ? 1 : std::max(1.0, routing.blocks / routing.experts);
  const double bytes =
      routing.experts * reads(weight, times, *device.chip) + reads(distinct, rows / distinct, *device.chip) + written;

  // The number of non-empty units of rows. Only the last block of an expert can be partly filled.
  const uint32_t unit = rules.threads == nullptr ? rules.row_unit : tiling.tile.M;
  const double units = expected_routing(tokens, problem.top_k, problem.experts, unit).blocks;
  const double used = std::min<double>(tiling.tile.M, unit * units / routing.blocks);
  const auto threadgroups =
      columns * (adds_up_tokens(tiling) ? tokens : static_cast<uint64_t>(std::ceil(routing.blocks * (1 - kRounding))));
  const Core core = busiest_core(tiling, product, threadgroups, tiling.tile.M, used, kExpertsStart, device);
  const double cached = routing.blocks * weight + double(columns) * rows + written;
  found.seconds.push_back(together(memory_seconds(bytes, routing.experts * weight, device), core.seconds,
                                   cache_seconds(cached, threadgroups, device)));
  found.in_flight = core.in_flight;
  if (combines(tiling, problem)) found.seconds.push_back(combine_seconds(problem, device));
  return found;
}

Routing expected_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows) {
  const double chosen = double(top_k) / experts;
  const double mean = tokens * chosen;
  if (chosen >= 1) return {double(experts), double(experts) * ceil_divide(tokens, block_rows)};
  // With many rows, the last block of an expert has each possible number of rows with equal probability.
  if (mean > kManyRows) return {double(experts), experts * (mean / block_rows + 0.5 - 0.5 / block_rows)};
  Routing routing;
  double probability = std::exp(tokens * std::log1p(-chosen));  // binomial: the probability that an expert has `rows`
                                                                // rows
  for (uint32_t rows = 0; rows <= tokens && rows < 4 * kManyRows; ++rows) {
    if (rows > 0) routing.experts += experts * probability;
    routing.blocks += experts * probability * ceil_divide(rows, block_rows);
    probability *= (tokens - rows) / (rows + 1.0) * chosen / (1 - chosen);
  }
  // If each token chooses nearly all of very many experts, the first probability underflows, so both sums are 0. Then
  // each expert has nearly all tokens.
  return routing.blocks > 0 ? routing : Routing{double(experts), double(experts) * ceil_divide(tokens, block_rows)};
}

}  // namespace marlin
