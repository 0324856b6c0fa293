// Plans the probes, which ask a GPU what the kernels of products need to know of it. csrc/planner/choose.cpp plans the
// products. Pure C++: no torch, no Metal.
#pragma once

#include <string>

#include "csrc/planner/plan.h"

namespace marlin {

Plan plan_probe();
Plan plan_tensor_probe();
// Returns the reason why the kernels for tensor units cannot run on a GPU, from the kTensorProbed words that the plan
// of plan_tensor_probe() stored; an empty text if they can.
std::string tensor_layout_refusal(const int32_t* words);

}  // namespace marlin
