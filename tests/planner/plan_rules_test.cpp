// Tests the GPU planner with rules that hold for every plan.
#include <algorithm>
#include <random>

#include "plan_checks.h"

using namespace marlin;

namespace {

std::vector<Dispatch> products_of(const Plan& plan) {
  std::vector<Dispatch> products;
  std::ranges::copy_if(plan.dispatches, std::back_inserter(products),
                       [](const Dispatch& dispatch) { return std::holds_alternative<GemmParams>(dispatch.params); });
  return products;
}

void check_reduction(const GemmProblem& problem, const Plan& plan, bool shares) {
  const Dispatch& product = plan.dispatches.front();
  const Dispatch& last = plan.dispatches.back();
  expect(product.constants[kConstantWritesPartials] == shares,
         "partial sums are written if K is split over threadgroups");
  expect(plan.dispatches.size() == products_of(plan).size() + (shares ? 1 : 0), "there is a reduction if K is split");
  expect((plan.partials.z != 0) == shares, "there is a workspace if K is split over threadgroups");
  expect((last.constants[kConstantHasBias] != 0) == problem.has_bias, "the last kernel adds the bias");
}

// Checks that K is split over z of the grid, in slices of equal length except the last.
void check_slices(const GemmProblem& problem, const Plan& plan) {
  const Dispatch& product = plan.dispatches.front();
  const Dispatch& last = plan.dispatches.back();
  const bool splits = product.grid.z > 1;
  check_reduction(problem, plan, splits);
  if (!splits) return;
  expect(last.instance.kernel == Kernel::reduce, "the second kernel reduces");
  expect(product.constants[kConstantHasBias] == 0, "the bias is added once");
  const auto& reduce = std::get<ReduceParams>(last.params);
  expect(reduce.M == problem.M && reduce.N == problem.weight.N && reduce.splits == product.grid.z,
         "the reduction's sizes");
  expect(plan.partials.x == problem.weight.N && plan.partials.y == problem.M && plan.partials.z == reduce.splits,
         "the workspace's sizes");
  expect_tiling(last.grid.x, last.threads.x, problem.weight.N, "reduced columns");
  expect_tiling(last.grid.y, last.threads.y, problem.M, "reduced rows");
}

// Iterates over the stripes as the kernel does. Checks that every unit belongs to one stripe, that each partial sum has
// its own slot, and that the reduction's grid has one slice in z for each tile that several stripes share.
void check_stripes(const GemmProblem& problem, const Plan& plan, TileShape tile, const GpuDevice& device) {
  const Dispatch& product = plan.dispatches.front();
  const auto& params = std::get<GemmParams>(product.params);
  const uint32_t slices = stripe_slices(params.K, params.k_per_slice);
  const uint32_t tiles = ceil_divide(problem.M, tile.M) * ceil_divide(problem.weight.N, tile.N);
  const uint32_t units = tiles * slices;
  const uint32_t stripes = product.grid.x;
  expect(product.grid.y == 1 && product.grid.z == 1, "threadgroups are in one line");
  expect(stripes <= units, "every threadgroup has work");
  expect(stripes <= device.cores * 4, "no more threadgroups than the GPU holds at once");
  expect(params.k_per_slice % tile.K == 0, "slices consist of whole k-steps");
  expect(uint64_t{slices - 1} * params.k_per_slice < params.K, "no slice is empty");

  std::vector<uint32_t> stripes_of_tile(tiles, 0);
  uint32_t next = 0;
  uint32_t shortest = units;
  uint32_t longest = 0;
  for (uint32_t stripe = 0; stripe < stripes; ++stripe) {
    const uint32_t begin = stripe_begin(units, stripes, stripe);
    const uint32_t end = stripe_begin(units, stripes, stripe + 1);
    expect(begin == next && end > begin, "stripes follow each other and none is idle");
    next = end;
    shortest = std::min(shortest, end - begin);
    longest = std::max(longest, end - begin);
    uint32_t unfinished = 0;
    for (uint32_t t = begin / slices; t <= (end - 1) / slices; ++t) {
      ++stripes_of_tile[t];
      const bool is_later_and_unfinished = t * slices > begin && (t + 1) * slices > end;
      unfinished += is_later_and_unfinished ? 1 : 0;
    }
    expect(unfinished <= 1, "two slots for a stripe's partial sums are enough");
  }
  expect(next == units, "every unit is taken");
  expect(longest - shortest <= 1, "stripes differ by at most one unit");

  const auto is_shared = [](uint32_t count) { return count > 1; };
  const bool shares = std::ranges::any_of(stripes_of_tile, is_shared);
  check_reduction(problem, plan, shares);
  expect((product.constants[kConstantHasBias] != 0) == problem.has_bias, "whole tiles are stored with their bias");
  if (!shares) return;
  const Dispatch& last = plan.dispatches.back();
  expect(last.instance.kernel == Kernel::reduce_striped, "the second kernel reduces");
  const auto& reduce = std::get<StripedReduceParams>(last.params);
  expect(reduce.M == problem.M && reduce.N == problem.weight.N && reduce.tile_M == tile.M && reduce.tile_N == tile.N &&
             reduce.slices == slices && reduce.stripes == stripes,
         "the reduction's sizes");
  expect(plan.partials.x == tile.N && plan.partials.y == tile.M && plan.partials.z == 2 * stripes,
         "the workspace's sizes");
  expect(last.grid.z == stripes - 1, "the reduction has a layer for each border");
  expect(last.grid.x * last.threads.x == tile.N, "the reduction has one thread for each column of a tile");
  expect(last.grid.y * last.threads.y == tile.M, "the reduction has one thread for each row of a tile");
}

void check_two_pass(const GemmProblem& problem, const Plan& plan) {
  expect(plan.dense_product && plan.dispatches.size() == 1 && plan.partials.z == 0,
         "one dispatch, then a dense product");
  const Dispatch& dequantize = plan.dispatches.front();
  const KernelInstance instance{Kernel::dequantize, problem.weight.format, problem.activations};
  expect(dequantize.instance == instance, "the weight is decoded to the activations' type");
  const auto& params = std::get<DequantizeParams>(dequantize.params);
  expect(params.N == problem.weight.N && params.K == problem.weight.K, "the weight's sizes");
}

void check_gemv(const GemmProblem& problem, const Plan& plan, const GpuDevice& device) {
  const Dispatch& product = plan.dispatches.front();
  const auto& params = std::get<GemmParams>(product.params);
  const auto rows = static_cast<uint32_t>(product.constants[kConstantRows]);
  const uint32_t simdgroups = product.threads.x / kSimdWidth;
  expect(rows >= 1 && rows <= kGemvMaxRows, "rows of a threadgroup are within gemv's limit");
  expect(product.threads.x % kSimdWidth == 0 && simdgroups >= 1 && simdgroups <= kGemvMaxSimdgroups,
         "simdgroups are whole and within gemv's limit");
  expect(product.threadgroup_bytes == gemv_threadgroup_bytes(problem.weight.format, rows, simdgroups),
         "threadgroup memory");
  expect(product.constants[kConstantSubnormalCodes] == device.half_subnormals,
         "the constant for subnormal codes is the probe's answer");
  expect((product.constants[kConstantRaggedK] != 0) == (problem.weight.K % kGemvK != 0),
         "K is ragged if it is not a multiple of a step");
  expect((product.constants[kConstantRaggedN] != 0) == (problem.weight.N % kGemvColumns != 0),
         "N is ragged if it is not a multiple of a strip");
  expect(params.k_per_slice % kGemvK == 0, "slices consist of whole steps");
  expect_tiling(product.grid.x, rows, problem.M, "rows");
  expect_tiling(product.grid.y, kGemvColumns, problem.weight.N, "columns");
  expect_tiling(product.grid.z, uint64_t{simdgroups} * params.k_per_slice, problem.weight.K, "k");
  check_slices(problem, plan);
}

void check_row_blocks(const GemmProblem& problem, const Dispatch& product, const GpuDevice& device) {
  const auto& params = std::get<GemmParams>(product.params);
  const WeightProblem& weight = problem.weight;
  const auto rows = static_cast<uint32_t>(product.constants[kConstantRows]);
  const uint32_t simdgroups = product.threads.x / kSimdWidth;
  expect(rows % 8 == 0 && rows >= 8 && rows <= kFusedMaxRows, "rows of a threadgroup are within fused's limit");
  expect(product.threads.x % kSimdWidth == 0 && simdgroups >= 1 && simdgroups <= kFusedMaxSimdgroups,
         "simdgroups are whole and within fused's limit");
  expect(product.threadgroup_bytes == fused_threadgroup_bytes(weight.format, rows, simdgroups), "threadgroup memory");
  expect(product.threadgroup_bytes <= 20 * 1024, "three threadgroups fit on a core");
  expect((product.constants[kConstantSubnormalCodes] != 0) == device.half_subnormals,
         "the constant for subnormal codes is the probe's answer");
  expect((product.constants[kConstantRaggedK] != 0) == (weight.K % kFusedK != 0),
         "K is ragged if it is not a multiple of a step");
  expect((product.constants[kConstantRaggedN] != 0) == (weight.N % kFusedColumns != 0),
         "N is ragged if it is not a multiple of a strip");
  const uint32_t group = std::min(weight.group_size, weight.K);
  const auto short_group = static_cast<uint32_t>(product.constants[kConstantShortGroupSize]);
  expect(short_group == 0 ? group % kFusedK == 0 || group == weight.K : short_group == group,
         "the constant for short groups is set if a step has several groups");
  expect(params.k_per_slice % kFusedK == 0, "slices consist of whole steps");
  expect(params.M == problem.M, "M of the problem");
  expect_tiling(product.grid.x, kFusedColumns, weight.N, "columns");
  expect_tiling(product.grid.z, uint64_t{simdgroups} * params.k_per_slice, weight.K, "k");
}

// Checks that the row blocks of all dispatches are consecutive, and that all dispatches have the same slices of K.
void check_fused(const GemmProblem& problem, const Plan& plan, const GpuDevice& device) {
  uint32_t next = 0;
  for (const Dispatch& product : products_of(plan)) {
    check_row_blocks(problem, product, device);
    const auto& params = std::get<GemmParams>(product.params);
    expect(params.m_begin == next && next < problem.M, "row blocks of all dispatches follow each other");
    next += product.grid.y * static_cast<uint32_t>(product.constants[kConstantRows]);
    expect(next < problem.M + static_cast<uint32_t>(product.constants[kConstantRows]), "no row block is empty");
    expect(product.grid.z == plan.dispatches.front().grid.z &&
               params.k_per_slice == std::get<GemmParams>(plan.dispatches.front().params).k_per_slice,
           "all dispatches have the same slices of K");
  }
  expect(next >= problem.M, "row blocks cover all rows");
  check_slices(problem, plan);
}

void check_tiles(const GemmProblem& problem, const Tiling& tiling, const Plan& plan, const GpuDevice& device) {
  const Dispatch& product = plan.dispatches.front();
  const auto& params = std::get<GemmParams>(product.params);
  const TileShape tile = tiling.tile;
  const uint32_t stages = tiling.variant == GemmVariant::single_stage ? 1 : 2;
  expect(product.threads.x == tile_threads(tile) && product.threads.y == 1, "threads of the tile");
  expect(product.threadgroup_bytes == tile_threadgroup_bytes(tile, problem.activations, stages), "threadgroup memory");
  if (tiling.variant == GemmVariant::striped) {
    check_stripes(problem, plan, tile, device);
    return;
  }
  expect(params.k_per_slice % tile.K == 0, "slices consist of whole k-steps");
  expect_tiling(product.grid.x, tile.N, problem.weight.N, "columns");
  expect_tiling(product.grid.y, tile.M, problem.M, "rows");
  expect_tiling(product.grid.z, params.k_per_slice, problem.weight.K, "k");
  check_slices(problem, plan);
}

void check_tiling(const GemmProblem& problem, const Tiling& tiling, const Plan& plan, const GpuDevice& device) {
  subject = name(tiling) + ": " + text(plan);
  for (const Dispatch& dispatch : plan.dispatches)
    check_dispatch(dispatch);
  const Dispatch& product = plan.dispatches.front();
  const WeightProblem& weight = problem.weight;
  if (weight.N % 4 != 0)
    expect(product.constants[kConstantVectorColumns] == 0, "no vector loads if N is no multiple of 4");
  if (tiling.variant == GemmVariant::two_pass) {
    check_two_pass(problem, plan);
    return;
  }
  if (weight.has_perm) expect(product.constants[kConstantVectorActivations] == 0, "no vector loads through perm");
  const auto& params = std::get<GemmParams>(product.params);
  expect(params.M == problem.M && params.N == weight.N && params.K == weight.K, "sizes of the problem");
  expect(params.group_size == std::min(weight.group_size, weight.K), "group size");
  expect(params.a_row_stride == problem.a_row_stride, "row stride");
  if (tiling.variant == GemmVariant::gemv) {
    check_gemv(problem, plan, device);
  } else if (tiling.variant == GemmVariant::fused) {
    check_fused(problem, plan, device);
  } else {
    check_tiles(problem, tiling, plan, device);
  }
}

// Checks every tiling, and that the plan belongs to one of them.
void check_gemm(const GemmProblem& problem, const GpuDevice& device) {
  const std::string chosen = text(plan_gemm(problem, device));
  bool is_of_a_tiling = false;
  for (const Tiling& tiling : gemm_tilings(problem, device)) {
    const Plan plan = build_plan(tiling, problem, device);
    check_tiling(problem, tiling, plan, device);
    is_of_a_tiling |= text(plan) == chosen;
  }
  subject = chosen;
  expect(is_of_a_tiling, "the plan belongs to one of the tilings");
  expect(text(plan_gemm(problem, device)) == chosen, "a second call gives the same plan");
}

void check_random_problems() {
  std::mt19937 random(0);
  const auto pick = [&](uint32_t from, uint32_t to) { return std::uniform_int_distribution(from, to)(random); };
  const uint32_t groups[] = {16, 32, 64, 128, 256};
  for (int i = 0; i < 4000; ++i) {
    const uint32_t K = 8 * pick(1, i % 4 == 0 ? 4096 : 40);
    const uint32_t group = pick(0, 5);
    GemmProblem problem =
        square(pick(1, i % 3 == 0 ? 5000 : 80), pick(1, i % 5 == 0 ? 20000 : 300), K, group == 5 ? K : groups[group]);
    problem.weight.format = static_cast<WeightFormat>(pick(0, kWeightFormatCount - 1));
    problem.activations = static_cast<ElementType>(pick(0, 2));
    problem.has_bias = pick(0, 1);
    problem.weight.has_perm = pick(0, 1);
    problem.weight.vector_aligned = pick(0, 1);
    const GpuDevice device{pick(1, 80), pick(0, 1) == 1};
    check_gemm(problem, device);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"random problems", check_random_problems}}, argc, argv);
}
