// The Python module: the table of weight formats, the CPU capability and the planner. The operators are not here; they
// are registered with torch.ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/core/weight_format.h"
#include "csrc/cpu/capability.h"
#include "csrc/cpu/huge_pages.h"
#include "csrc/python/planner_bindings.h"

namespace py = pybind11;

namespace marlin {
namespace {

const char* scale_coding_name(ScaleCoding coding) {
  switch (coding) {
    case ScaleCoding::e4m3:
      return "e4m3";
    case ScaleCoding::e8m0:
      return "e8m0";
    default:
      return "floating";
  }
}

const char* code_kind_name(CodeKind kind) {
  switch (kind) {
    case CodeKind::integer:
      return "integer";
    case CodeKind::e2m1:
      return "e2m1";
    default:
      return "table";
  }
}

const char* zeros_role_name(ZerosRole role) {
  switch (role) {
    case ZerosRole::zero_point:
      return "zero_point";
    case ZerosRole::bias:
      return "bias";
    default:
      return "none";
  }
}

py::list weight_formats() {
  py::list rows;
  for (const WeightFormatInfo& row : kWeightFormats) {
    rows.append(py::make_tuple(row.name, row.formula, code_kind_name(code_kind(row.format)),
                               scale_coding_name(row.scale_coding), zeros_role_name(row.zeros_role),
                               row.has_global_scale, row.has_lut,
                               row.fixed_group_size == 0 ? py::object(py::none()) : py::int_(row.fixed_group_size)));
  }
  return rows;
}

py::tuple cpu_capability() {
  const cpu::Capability& found = cpu::capability();
  std::vector<std::string> available;
  for (cpu::Isa isa : found.available)
    available.emplace_back(cpu::isa_name(isa));
  return py::make_tuple(cpu::isa_name(found.isa), found.reason, found.features, available);
}

}  // namespace
}  // namespace marlin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = TORCH_MARLIN_METAL_TORCH_VERSION;
  m.def("weight_formats", &marlin::weight_formats);
  m.def("group_sizes", [] { return marlin::kGroupSizes; });
  m.def("e2m1_values", [] { return marlin::kE2M1Values; });
  m.def("cpu_capability", &marlin::cpu_capability);
  m.def("prefer_huge_pages",
        [](uintptr_t data, int64_t bytes) { marlin::cpu::prefer_huge_pages(reinterpret_cast<void*>(data), bytes); });
  marlin::add_planner(m);
}
