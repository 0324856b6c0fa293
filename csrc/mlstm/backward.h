// The backward pass of the mLSTM, and the handle of mlstm_states, which the backward pass calls.
#pragma once

#include <tuple>

#include "csrc/core/weight_arguments.h"
#include "csrc/mlstm/argument_rules.h"

namespace marlin {

using MlstmStatesSignature = ThreeTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                          const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                          int64_t);

inline const auto& mlstm_states_op() {
  static const auto op = find_operator<MlstmStatesSignature>("torch_marlin_metal::mlstm_states");
  return op;
}

// The gradients of q, k, v, i, f, C0, n0 and m0, each in the dtype of its tensor.
using MlstmGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

MlstmGradients mlstm_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                              const Tensor& h, const Tensor& grad_h, const Tensor& grad_C, const Tensor& grad_n,
                              const Tensor& grad_m, int64_t chunk_size, double eps);

}  // namespace marlin
