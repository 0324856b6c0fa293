// The schemas of the mLSTM operators and their fake (Meta) kernels. docs/use/mlstm.md lists shapes and dtypes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "csrc/mlstm/backward.h"

TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def(
      "mlstm_states(Tensor k, Tensor v, Tensor i, Tensor f, *, Tensor? C0=None, Tensor? n0=None, Tensor? m0=None, "
      "int chunk_size, int save_states_every=1) -> (Tensor C, Tensor n, Tensor m)");
  m.def(
      "mlstm_output(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor C, Tensor n, Tensor m, *, int chunk_size, "
      "float eps=1e-6) -> (Tensor h, Tensor N, Tensor M)");
  m.def(
      "mlstm(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, *, Tensor? C0=None, Tensor? n0=None, Tensor? m0=None, "
      "int chunk_size=0, float eps=1e-6) -> (Tensor h, Tensor C, Tensor n, Tensor m)");
  m.def(
      "mlstm_step(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor C, Tensor n, Tensor m, *, float eps=1e-6) "
      "-> (Tensor h, Tensor C, Tensor n, Tensor m)");
  // The backward pass is an operator of its own, so torch.compile does not trace its loop over chunks.
  m.def(
      "_mlstm_backward(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor? C0, Tensor? n0, Tensor? m0, Tensor h, "
      "Tensor grad_h, Tensor grad_C, Tensor grad_n, Tensor grad_m, int chunk_size, float eps) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

namespace marlin {
namespace {

ThreeTensors mlstm_states_meta(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                               const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                               int64_t chunk_size, int64_t save_states_every) {
  const MlstmShape s = check_mlstm_states(k, v, i, f, {C0, n0, m0}, chunk_size, save_states_every);
  const auto options = k.options().dtype(mlstm_state_dtype(k));
  const c10::SymInt slots = s.S / chunk_size / save_states_every + 1;
  return {at::empty_symint({s.B, s.H, slots, s.DK, s.DV}, options), at::empty_symint({s.B, s.H, slots, s.DK}, options),
          at::empty_symint({s.B, s.H, slots}, options)};
}

ThreeTensors mlstm_output_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                               const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps) {
  const MlstmShape s = check_mlstm_output(q, k, v, i, f, C, n, m, chunk_size, eps);
  return {at::empty_symint({s.B, s.H, s.S, s.DV}, q.options()), at::empty_symint({s.B, s.H, s.S}, m.options()),
          at::empty_symint({s.B, s.H, s.S}, m.options())};
}

FourTensors mlstm_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                       const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0, int64_t chunk_size,
                       double eps) {
  const MlstmShape s = check_mlstm(q, k, v, i, f, {C0, n0, m0}, chunk_size, eps);
  const auto options = q.options().dtype(mlstm_state_dtype(q));
  return {at::empty_symint({s.B, s.H, s.S, s.DV}, q.options()), at::empty_symint({s.B, s.H, s.DK, s.DV}, options),
          at::empty_symint({s.B, s.H, s.DK}, options), at::empty_symint({s.B, s.H}, options)};
}

FourTensors mlstm_step_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                            const Tensor& C, const Tensor& n, const Tensor& m, double eps) {
  const MlstmShape s = check_mlstm_step(q, k, v, i, f, C, n, m, eps);
  return {at::empty_symint({s.B, s.H, s.DV}, q.options()), at::empty_symint({s.B, s.H, s.DK, s.DV}, C.options()),
          at::empty_symint({s.B, s.H, s.DK}, C.options()), at::empty_symint({s.B, s.H}, C.options())};
}

MlstmGradients mlstm_backward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                   const Tensor&, const Tensor& grad_C, const Tensor& grad_n, const Tensor& grad_m,
                                   int64_t, double) {
  auto like = [](const Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  return {like(q), like(k), like(v), like(i), like(f), like(grad_C), like(grad_n), like(grad_m)};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("mlstm_states", mlstm_states_meta);
  m.impl("mlstm_output", mlstm_output_meta);
  m.impl("mlstm", mlstm_meta);
  m.impl("mlstm_step", mlstm_step_meta);
  m.impl("_mlstm_backward", mlstm_backward_meta);
}

}  // namespace marlin
