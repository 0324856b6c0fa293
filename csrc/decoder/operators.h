// A handle to call gated_activation through PyTorch's dispatcher.
#pragma once

#include "csrc/core/weight_arguments.h"

namespace marlin {

using ActivationSignature = Tensor(const Tensor&, const Tensor&, std::string_view, std::optional<double>,
                                   std::optional<double>);

inline const auto& activation_op() {
  static const auto op = find_operator<ActivationSignature>("torch_marlin_metal::gated_activation");
  return op;
}

}  // namespace marlin
