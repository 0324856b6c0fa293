// Makes the planner and its tables available in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace marlin {

void add_planner(pybind11::module_& m);

}  // namespace marlin
