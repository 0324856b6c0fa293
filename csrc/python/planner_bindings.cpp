#include "csrc/python/planner_bindings.h"

#include <pybind11/stl.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/experts/gpu_plan.h"
#include "csrc/gemm/plan_cache.h"
#include "csrc/planner/commit_policy.h"
#include "csrc/planner/decisions.h"
#include "csrc/planner/estimate.h"
#include "csrc/planner/variants.h"

namespace py = pybind11;

namespace marlin {
namespace {

py::tuple figure(const Figure& figure) {
  return py::make_tuple(figure.value, figure.source);
}

py::list chips() {
  py::list rows;
  for (const Chip& chip : kChips) {
    py::dict figures;
#define MARLIN_ADD_FIGURE(field) figures[#field] = figure(chip.field);
    MARLIN_CHIP_FIGURES(MARLIN_ADD_FIGURE)
#undef MARLIN_ADD_FIGURE
    rows.append(py::make_tuple(chip.name, chip.family, chip.cores, chip.fewest_cores, figures));
  }
  return rows;
}

py::list gpu_families() {
  py::list rows;
  for (const GpuFamily& family : kGpuFamilies) {
    py::dict figures;
#define MARLIN_ADD_FIGURE(field) \
  if (family.field.value != 0) figures[#field] = figure(family.field);  // 0: the family has no such unit
    MARLIN_FAMILY_FIGURES(MARLIN_ADD_FIGURE)
#undef MARLIN_ADD_FIGURE
    rows.append(py::make_tuple(family.number, family.has_bfloat, figures));
  }
  return rows;
}

py::tuple tile_tuple(const TileShape& tile) {
  return py::make_tuple(tile.M, tile.N, tile.K);
}

const Chip& chip_of(const std::string& name) {
  const Chip* chip = find_chip(name);
  if (chip == nullptr) throw std::invalid_argument("chip: expected a name in chips(), got '" + name + "'");
  return *chip;
}

py::tuple extent(const Extent& extent) {
  return py::make_tuple(extent.x, extent.y, extent.z);
}

py::dict dispatch_dict(const Dispatch& dispatch, uint32_t half_registers) {
  std::ostringstream text;
  text << dispatch;
  py::dict entry;
  entry["kernel"] = info(dispatch.instance.kernel).name;
  entry["function"] = host_name(dispatch.instance);
  entry["text"] = text.str();
  entry["grid"] = extent(dispatch.grid);
  entry["threads"] = extent(dispatch.threads);
  entry["threadgroup_bytes"] = dispatch.threadgroup_bytes;
  entry["half_registers"] = half_registers;
  entry["seconds"] = dispatch.seconds;
  return entry;
}

// Returns the dispatches of a plan. The register count of a kernel that computes no product is unknown, and returned as
// 0.
py::list dispatch_list(const Plan& plan, const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  py::list dispatches;
  uint32_t launch = 0;
  for (const Dispatch& dispatch : plan.dispatches) {
    const bool computes = !plan.dense_product && dispatch.instance.kernel == tiling.kernel;
    const uint32_t rows = computes ? row_blocks(tiling, problem.M, launch++).rows : 0;
    dispatches.append(dispatch_dict(dispatch, computes ? half_registers(tiling, problem, rows, device) : 0));
  }
  if (plan.dense_product) {  // PyTorch launches the dense product
    Dispatch dense;
    dense.seconds = estimate(tiling, problem, device).seconds.at(1);
    py::dict entry = dispatch_dict(dense, 0);
    for (const char* key : {"kernel", "function", "text"})
      entry[key] = "torch.matmul";
    dispatches.append(entry);
  }
  return dispatches;
}

template <typename Enum, size_t count>
Enum named(const std::string& wanted, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (name(static_cast<Enum>(i)) == wanted) return static_cast<Enum>(i);
  }
  throw std::invalid_argument(std::string(what) + ": expected a known name, got '" + wanted + "'");
}

WeightFormat weight_format(const std::string& name) {
  return named<WeightFormat, kWeightFormatCount>(name, "weight_format");
}

ElementType element(const std::string& name) {
  return named<ElementType, 5>(name, "dtype");
}

py::tuple gemm_plans(const std::string& chip, uint32_t cores, bool half_subnormals, uint32_t M, uint32_t N, uint32_t K,
                     const std::string& format, uint32_t group_size, const std::string& activations,
                     const std::string& scales, const std::string& zeros, bool has_perm, bool has_global_scale,
                     bool has_bias, const std::string& variant, bool tuned, bool own_system) {
  GemmProblem problem{.M = M,
                      .a_row_stride = K,
                      .activations = element(activations),
                      .bias = element(activations),
                      .has_bias = has_bias,
                      .vector_aligned_a = true,
                      .variant = variant};
  problem.weight = {.format = weight_format(format),
                    .K = K,
                    .N = N,
                    .group_size = group_size,
                    .scales = element(scales),
                    .zeros = element(zeros),
                    .has_perm = has_perm,
                    .has_global_scale = has_global_scale,
                    .vector_aligned = true};
  if (tuned && problem.variant.is_open()) problem.tuned = tuned_variant(problem);
  GpuDevice device{cores, half_subnormals, &chip_of(chip)};
  device.decodes = decode_limits();
  set_system(device, own_system ? this_system() : supposed_system(*device.chip));
  const std::vector<Tiling> tilings = gemm_tilings(problem, device);
  const Tiling& chosen = choose(tilings, problem);
  py::list rows;
  for (const Tiling& tiling : tilings) {
    const Plan plan = build_plan(tiling, problem, device);
    rows.append(py::make_tuple(name(tiling), name(tiling.variant), tile_tuple(tiling.tile), tiling.seconds,
                               dispatch_list(plan, tiling, problem, device)));
  }
  return py::make_tuple(rows, &chosen - tilings.data(), reason(chosen, problem, device));
}

// Returns the tiling's name, the dispatches of a moe_gemm, and whether its kernel also computes a gated activation. The
// tokens, and all scales that are not one-byte codes, have the type of the activations.
py::tuple moe_plan(const std::string& chip, uint32_t cores, uint32_t tokens, uint32_t top_k, uint32_t experts,
                   uint32_t N, uint32_t K, const std::string& format, uint32_t group_size,
                   const std::string& activations, bool rows_by_slot, bool reduce, const std::string& variant) {
  const WeightFormat weight = weight_format(format);
  const ElementType type = element(activations);
  MoeProblem problem{.product = {.weight = {.format = weight,
                                            .K = K,
                                            .N = N,
                                            .group_size = group_size,
                                            .scales = type,
                                            .zeros = type,
                                            .vector_aligned = true},
                                 .M = tokens * top_k,
                                 .a_row_stride = int64_t{K} * (rows_by_slot ? top_k : 1),
                                 .activations = type,
                                 .vector_aligned_a = true,
                                 .variant = variant},
                     .a_slot_stride = rows_by_slot ? K : 0,
                     .experts = experts,
                     .top_k = top_k,
                     .has_row_weights = reduce,
                     .reduce = reduce,
                     .gate = reduce ? OptionalGate{} : OptionalGate(MoeGate{})};
  GpuDevice device{cores, true, &chip_of(chip)};
  set_system(device, supposed_system(*device.chip));
  const Tiling tiling = moe_tiling(problem, device);
  const Plan plan = plan_moe(problem, device);
  return py::make_tuple(name(tiling), dispatch_list(plan, tiling, problem.product, device), plan.applies_gate);
}

using TunedRow = std::tuple<std::string, std::string, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, std::string>;

}  // namespace

void add_planner(py::module_& m) {
  m.def("chips", &chips);
  m.def("gpu_families", &gpu_families);
  // Returns a dict with all variants in the planner's order. The value is true if the variant rounds the weight.
  m.def("gemm_variants", [] {
    py::dict rounds;
    for (std::string_view text : kGemmVariants)
      rounds[py::str(text)] = rounds_weight(*variant_of(text));
    return rounds;
  });
  // Returns the chip's name and the number of cores that the planner assumes for a GPU with this name and core count.
  m.def("gpu_device", [](const std::string& name, uint32_t cores) {
    const GpuDevice device = gpu_device(name, cores, this_system().family);
    return py::make_tuple(device.chip->name, device.cores);
  });
  m.def("dispatch_seconds", [] { return kDispatchSeconds; });
  m.def("gemm_plans", &gemm_plans, py::arg("chip"), py::arg("cores"), py::arg("half_subnormals"), py::arg("M"),
        py::arg("N"), py::arg("K"), py::arg("weight_format"), py::arg("group_size"), py::arg("activations"),
        py::arg("scales"), py::arg("zeros"), py::arg("has_perm"), py::arg("has_global_scale"), py::arg("has_bias"),
        py::arg("variant"), py::arg("tuned"), py::arg("own_system"));
  m.def("moe_plan", &moe_plan, py::arg("chip"), py::arg("cores"), py::arg("tokens"), py::arg("top_k"),
        py::arg("experts"), py::arg("N"), py::arg("K"), py::arg("weight_format"), py::arg("group_size"),
        py::arg("activations"), py::arg("rows_by_slot"), py::arg("reduce"), py::arg("variant"));
  m.def("commit_seconds", &commit_seconds);
  m.def("set_commit_seconds", &set_commit_seconds);
  m.def("longest_plan_seconds", &longest_plan_seconds);
  m.def("set_longest_plan_seconds", &set_longest_plan_seconds);
  // Replaces the table of tuned ranges. A row is (weight_format, dtype, group_size, K, N, first M, last M, variant).
  m.def("set_tuned", [](const std::vector<TunedRow>& rows) {
    std::vector<TunedRange> ranges;
    for (const auto& [format, activations, group_size, K, N, first, last, variant] : rows) {
      if (!variant_of(variant)) throw std::invalid_argument("tuned: no kernel variant '" + variant + "'");
      // A table from an earlier version may name a tile that no longer exists. Such a row counts as not measured.
      ranges.push_back({weight_format(format), element(activations), group_size, K, N, first, last,
                        NamedVariant::find(variant).value_or(NamedVariant{})});
    }
    set_tuned(ranges);
  });
  m.def("set_tuned_loader", [](py::function loader) {
    // The loader is never freed, because an operator may still plan a product while the interpreter shuts down.
    set_tuned_loader([kept = new py::function(std::move(loader))] {
      const py::gil_scoped_acquire gil;
      try {
        (*kept)();
      } catch (const py::error_already_set& error) {
        throw std::runtime_error(error.what());
      }
    });
  });
}

}  // namespace marlin
