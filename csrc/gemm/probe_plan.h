// Plans the probes: small kernels that test a GPU for the kernels of products. csrc/planner/choose.cpp plans the
// products. Pure C++: no torch, no Metal.
#pragma once

#include <string>

#include "csrc/planner/plan.h"

namespace marlin {

Plan plan_probe();
Plan plan_tensor_probe();
// From the kTensorProbed words of plan_tensor_probe()'s plan, returns why the kernels for tensor units cannot run on
// the GPU; an empty text if they can.
std::string tensor_layout_refusal(const int32_t* words);

}  // namespace marlin
