// The decoder layer's operators (norms, rotary, gated activation, cache) for MPS. Each operator is one dispatch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "csrc/core/tensor_views.h"
#include "csrc/decoder/argument_rules.h"
#include "csrc/decoder/gpu_plan.h"
#include "csrc/mps/encoder.h"

namespace marlin::mps {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;

void norm(const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset,
          const Tensor& y, const Tensor& sum) {
  const Tensor values = with_unit_stride(as_rows(x));
  const Tensor added = residual.defined() ? with_unit_stride(as_rows(residual)) : Tensor();
  const Tensor weights = weight.contiguous();
  const NormProblem problem{.x_stride = values.stride(0),
                            .residual_stride = added.defined() ? added.stride(0) : 0,
                            .rows = checked_size(op, "rows of x", values.size(0)),
                            .columns = checked_size(op, "x", values.size(1)),
                            .eps = static_cast<float>(eps),
                            .weight_offset = static_cast<float>(offset),
                            .weights = element_type(weights),
                            .has_residual = added.defined(),
                            .element = element_type(values)};
  Bindings bindings;
  bindings[kSlotX] = values;
  bindings[kSlotResidual] = added;
  bindings[kSlotNormWeight] = weights;
  bindings[kSlotNorm] = y;
  bindings[kSlotSum] = sum;
  encode(*find_plan(problem, plan_norm), std::move(bindings));
}

Tensor rms_norm_mps(const Tensor& x, const Tensor& weight, double eps, double offset) {
  check_rms_norm("rms_norm", x, std::nullopt, weight, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() != 0) norm("rms_norm", x, Tensor(), weight, eps, offset, y, Tensor());
  return y;
}

TwoTensors add_rms_norm_mps(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset) {
  check_rms_norm("add_rms_norm", x, residual, weight, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor sum = at::empty(x.sizes(), x.options());
  if (y.numel() != 0) norm("add_rms_norm", x, residual, weight, eps, offset, y, sum);
  return {y, sum};
}

HeadStrides strides(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Returns the strides of cos or sin [B or 1, S, R].
HeadStrides table_strides(const Tensor& table) {
  return {table.size(0) == 1 ? 0 : table.stride(0), 0, table.stride(1)};
}

TwoTensors rotary_mps(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved,
                      bool per_pair, bool transposed) {
  const char* op = "rotary";
  const int64_t rotary_size = check_rotary(q, k, cos, sin, per_pair).expect_int();
  Tensor q_out = empty_rotated(q);
  Tensor k_out = empty_rotated(k);
  if (q_out.numel() + k_out.numel() == 0) return {q_out, k_out};
  const Tensor held_q = with_unit_stride(q);
  const Tensor held_k = with_unit_stride(k);
  const Tensor held_cos = with_unit_stride(cos);
  const Tensor held_sin = with_unit_stride(sin);
  uint32_t flags = interleaved ? kRotaryInterleaved : 0;
  if (per_pair) flags |= kRotaryPerPair;
  if (transposed) flags |= kRotaryTransposed;
  if (has_token_rows(q)) flags |= kRotaryTokenRowsQ;
  if (has_token_rows(k)) flags |= kRotaryTokenRowsK;
  const RotaryProblem problem{.params = {.q = strides(held_q),
                                         .k = strides(held_k),
                                         .cos = table_strides(held_cos),
                                         .sin = table_strides(held_sin),
                                         .q_heads = checked_size(op, "heads of q", q.size(1)),
                                         .k_heads = checked_size(op, "heads of k", k.size(1)),
                                         .tokens = checked_size(op, "tokens of q", q.size(2)),
                                         .head_size = checked_size(op, "D of q", q.size(3)),
                                         .rotary_size = static_cast<uint32_t>(rotary_size),
                                         .table_type = static_cast<int32_t>(element_type(held_cos)),
                                         .flags = flags,
                                         .unused = 0},
                              .positions = checked_size(op, "B * S of q", q.size(0) * q.size(2)),
                              .element = element_type(held_q)};
  Bindings bindings;
  bindings[kSlotRotaryQ] = held_q;
  bindings[kSlotRotaryK] = held_k;
  bindings[kSlotCos] = held_cos;
  bindings[kSlotSin] = held_sin;
  bindings[kSlotRotatedQ] = q_out;
  bindings[kSlotRotatedK] = k_out;
  encode(*find_plan(problem, plan_rotary), std::move(bindings));
  return {q_out, k_out};
}

Tensor gated_activation_mps(const Tensor& gate, const Tensor& up, std::string_view activation,
                            std::optional<double> limit, std::optional<double> alpha) {
  const char* op = "gated_activation";
  const Activation kind = check_gated_activation(gate, up, activation, limit, alpha);
  Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Tensor gates = as_rows(gate);
  const Tensor ups = as_rows(up);
  const ActivationProblem problem{.gate_row = gates.stride(0),
                                  .up_row = ups.stride(0),
                                  .gate_column = gates.stride(1),
                                  .up_column = ups.stride(1),
                                  .rows = checked_size(op, "rows of gate", gates.size(0)),
                                  .columns = checked_size(op, "columns of gate", gates.size(1)),
                                  .activation = kind,
                                  .limit = static_cast<float>(limit.value_or(0)),
                                  .alpha = static_cast<float>(alpha.value_or(0)),
                                  .element = element_type(gates)};
  Bindings bindings;
  bindings[kSlotGate] = gates;
  bindings[kSlotUp] = ups;
  bindings[kSlotActivated] = out;
  encode(*find_plan(problem, plan_activation), std::move(bindings));
  return out;
}

void write_cache_mps(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v, const Tensor& start) {
  const char* op = "write_cache";
  check_write_cache(keys, values, k, v, start);
  if (k.numel() + v.numel() == 0) return;
  const Tensor held_k = with_unit_stride(k);
  const Tensor held_v = with_unit_stride(v);
  const CacheProblem problem{.params = {.k = strides(held_k),
                                        .v = strides(held_v),
                                        .heads = checked_size(op, "heads of k", k.size(1)),
                                        .tokens = checked_size(op, "tokens of k", k.size(2)),
                                        .length = checked_size(op, "tokens of keys", keys.size(2)),
                                        .k_size = checked_size(op, "D of keys", k.size(3)),
                                        .v_size = checked_size(op, "DV of values", v.size(3)),
                                        .unused = 0},
                             .positions = checked_size(op, "B * S of k", k.size(0) * k.size(2)),
                             .element = element_type(held_k)};
  Bindings bindings;
  bindings[kSlotKeys] = keys;
  bindings[kSlotValues] = values;
  bindings[kSlotNewKeys] = held_k;
  bindings[kSlotNewValues] = held_v;
  bindings[kSlotStart] = start;
  encode(*find_plan(problem, plan_cache_write), std::move(bindings));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("rms_norm", rms_norm_mps);
  m.impl("add_rms_norm", add_rms_norm_mps);
  m.impl("rotary", rotary_mps);
  m.impl("gated_activation", gated_activation_mps);
  m.impl("write_cache", write_cache_mps);
}

}  // namespace marlin::mps
