// The Python module: the CPU capability and the planner. The operators are registered with torch.ops instead.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/cpu/capability.h"
#include "csrc/cpu/huge_pages.h"
#include "csrc/python/planner_bindings.h"

namespace py = pybind11;

namespace marlin {
namespace {

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
  m.def("cpu_capability", &marlin::cpu_capability);
  m.def("prefer_huge_pages",
        [](uintptr_t data, int64_t bytes) { marlin::cpu::prefer_huge_pages(reinterpret_cast<void*>(data), bytes); });
  marlin::add_planner(m);
}
