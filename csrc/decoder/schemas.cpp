// The schemas of the decoder layer's operators (norms, rotary, gated activation, cache), and their fake (Meta) kernels.
// docs/use/operators.md lists shapes and dtypes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "csrc/decoder/argument_rules.h"

TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def("rms_norm(Tensor x, Tensor weight, *, float eps, float weight_offset=0.0) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, *, float eps, float weight_offset=0.0) "
      "-> (Tensor y, Tensor sum)");
  m.def(
      "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False, bool per_pair=False, "
      "bool transposed=False) -> (Tensor q, Tensor k)");
  m.def(
      "gated_activation(Tensor gate, Tensor up, *, str activation=\"silu\", float? limit=None, float? alpha=None) "
      "-> Tensor");
  m.def("write_cache(Tensor(a!) keys, Tensor(b!) values, Tensor k, Tensor v, Tensor start) -> ()");
}

namespace marlin {
namespace {

Tensor rms_norm_meta(const Tensor& x, const Tensor& weight, double eps, double) {
  check_rms_norm("rms_norm", x, std::nullopt, weight, eps);
  return at::empty_symint(x.sym_sizes(), x.options());
}

TwoTensors add_rms_norm_meta(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double) {
  check_rms_norm("add_rms_norm", x, residual, weight, eps);
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(x.sym_sizes(), x.options())};
}

TwoTensors rotary_meta(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool, bool per_pair,
                       bool) {
  check_rotary(q, k, cos, sin, per_pair);
  return {empty_rotated(q), empty_rotated(k)};
}

Tensor gated_activation_meta(const Tensor& gate, const Tensor& up, std::string_view activation,
                             std::optional<double> limit, std::optional<double> alpha) {
  check_gated_activation(gate, up, activation, limit, alpha);
  return at::empty_symint(gate.sym_sizes(), gate.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("rms_norm", rms_norm_meta);
  m.impl("add_rms_norm", add_rms_norm_meta);
  m.impl("rotary", rotary_meta);
  m.impl("gated_activation", gated_activation_meta);
  m.impl("write_cache", check_write_cache);
}

}  // namespace marlin
