// Values of function constants as text, and a check of their types.
#pragma once

#include <string>
#include <vector>

#include "metal.h"

namespace softmetal {

const std::vector<Program::Constant>& constants_of(MTLFunctionConstantValues* values);

// Returns an error message if a value has the wrong type, or an empty string.
std::string wrong_type(const sm_library* library, const std::vector<Program::Constant>& values);

}  // namespace softmetal
