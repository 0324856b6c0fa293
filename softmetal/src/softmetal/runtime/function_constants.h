// Values of function constants as text, and a check of their types.
#pragma once

#include <string>
#include <vector>

#include "metal.h"

namespace softmetal {

const std::vector<Program::Constant>& constants_of(MTLFunctionConstantValues* values);

// Returns what is wrong with the types of the values, or an empty string.
std::string wrong_type(const sm_library* library, const std::vector<Program::Constant>& values);

}  // namespace softmetal
