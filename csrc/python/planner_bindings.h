// The planner, its model and the tables behind them, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace marlin {

void add_planner(pybind11::module_& m);

}  // namespace marlin
