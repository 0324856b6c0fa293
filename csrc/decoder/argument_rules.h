// Shape and dtype rules of the decoder layer's operators (norms, rotary, gated activation, cache). All backends and the
// fake kernels share these rules.
#pragma once

#include "csrc/core/tensor_checks.h"
#include "kernels/decoder/params.h"

namespace marlin {

using TwoTensors = std::tuple<Tensor, Tensor>;

// Each check_ function checks the arguments of one operator, and calls fail() of csrc/core/tensor_checks.h.
void check_rms_norm(const char* op, const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps);

// Checks the arguments and returns the number of elements of a head that are rotated.
c10::SymInt check_rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool per_pair);

// Returns an uninitialized tensor with the shape of x [B, H, S, D]. If the heads of a token are adjacent in x, they are
// adjacent in the result. Otherwise the tokens of a head are adjacent in the result.
Tensor empty_rotated(const Tensor& x);

// Returns true if the heads of a token are adjacent in memory.
bool has_token_rows(const Tensor& x);

Activation check_activation(const char* op, std::string_view activation, std::optional<double> limit,
                            std::optional<double> alpha);

Activation check_gated_activation(const Tensor& gate, const Tensor& up, std::string_view activation,
                                  std::optional<double> limit, std::optional<double> alpha);

void check_write_cache(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v, const Tensor& start);

}  // namespace marlin
