// Plans the probes: small kernels that test which product kernels a GPU can run. Uses neither torch nor Metal.
// csrc/planner/choose.cpp plans the products.
#pragma once

#include <string>

#include "csrc/planner/plan.h"

namespace marlin {

Plan plan_probe();
Plan plan_tensor_probe();
// Reads the kTensorProbed words that the plan of plan_tensor_probe() wrote. Returns the reason why the kernels for
// tensor units cannot run on the GPU, or an empty text if they can.
std::string tensor_layout_refusal(const int32_t* words);

}  // namespace marlin
