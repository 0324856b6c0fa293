#include "csrc/decoder/argument_rules.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/SymBool.h>

#include <array>
#include <cmath>

namespace marlin {

namespace {

constexpr std::array<std::string_view, 5> kActivations{"silu", "gelu", "gelu_tanh", "clamped_silu", "limited_silu"};

// Fails unless the tensor is on the call's device and has the dtype and shape of `like`, an argument that has already
// been checked. `other` is the name of `like`.
void check_like(const Checker& check, std::string_view argument, const Tensor& tensor, std::string_view other,
                const Tensor& like) {
  if (tensor.scalar_type() != like.scalar_type() || tensor.sym_sizes() != like.sym_sizes()) {
    fail(check.op, argument, text(describe(like), " like ", other), describe(tensor));
  }
  check.on_device(argument, tensor);
}

}  // namespace

void check_rms_norm(const char* op, const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps) {
  if (!is_floating(x.scalar_type()) || x.dim() == 0) fail(op, "x", text(kFloating, " [..., N]"), describe(x));
  const Checker check{op, x.device()};
  if (residual) check_like(check, "residual", *residual, "x", x);
  if (!is_floating(weight.scalar_type()) || weight.dim() != 1 || weight.sym_size(0) != x.sym_size(-1)) {
    fail(op, "weight", text(kFloating, " [N] = [", x.sym_size(-1), "]"), describe(weight));
  }
  check.on_device("weight", weight);
  if (!(eps >= 0) || std::isinf(eps)) fail(op, "eps", "a number of at least 0", text(eps));
}

c10::SymInt check_rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool per_pair) {
  const char* op = "rotary";
  if (!is_floating(q.scalar_type()) || q.dim() != 4) fail(op, "q", text(kFloating, " [B, H, S, D]"), describe(q));
  const Checker check{op, q.device()};
  if (k.scalar_type() != q.scalar_type() || k.dim() != 4 || k.sym_size(0) != q.sym_size(0) ||
      k.sym_size(2) != q.sym_size(2) || k.sym_size(3) != q.sym_size(3)) {
    fail(op, "k", text(dtype_name(q.scalar_type()), " [B, heads, S, D] with the B, S and D of q ", q.sym_sizes()),
         describe(k));
  }
  check.on_device("k", k);
  const bool is_table = is_floating(cos.scalar_type()) && cos.dim() == 3;
  if (!is_table || (cos.sym_size(0) != 1 && cos.sym_size(0) != q.sym_size(0)) || cos.sym_size(1) != q.sym_size(2)) {
    fail(op, "cos", text(kFloating, " [B or 1, S, R] with the B and S of q ", q.sym_sizes()), describe(cos));
  }
  check.on_device("cos", cos);
  check_like(check, "sin", sin, "cos", cos);
  const c10::SymInt rotary_size = per_pair ? 2 * cos.sym_size(2) : cos.sym_size(2);
  if (rotary_size % 2 != 0 || rotary_size > q.sym_size(3)) {
    fail(op, "cos", text("a last dimension R with ", per_pair ? "2 R" : "even R", " of at most D = ", q.sym_size(3)),
         describe(cos));
  }
  return rotary_size;
}

bool has_token_rows(const Tensor& x) {
  return TORCH_GUARD_OR_FALSE(x.sym_stride(1).sym_lt(x.sym_stride(2)));
}

Tensor empty_rotated(const Tensor& x) {
  if (!has_token_rows(x)) return at::empty_symint(x.sym_sizes(), x.options());
  const c10::SymInt row = x.sym_size(1) * x.sym_size(3);
  return at::empty_strided_symint(x.sym_sizes(), {x.sym_size(2) * row, x.sym_size(3), row, 1}, x.options());
}

Activation check_activation(const char* op, std::string_view activation, std::optional<double> limit,
                            std::optional<double> alpha) {
  size_t index = 0;
  while (index < kActivations.size() && kActivations[index] != activation)
    ++index;
  if (index == kActivations.size()) {
    fail(op, "activation", "one of silu, gelu, gelu_tanh, clamped_silu, limited_silu", text("'", activation, "'"));
  }
  const auto found = static_cast<Activation>(index);
  const bool is_clamped = found == Activation::clamped_silu;
  const bool has_limit = is_clamped || found == Activation::limited_silu;
  if (limit.has_value() != has_limit || (limit && !(*limit > 0))) {
    fail(op, "limit", text(has_limit ? "a number above 0 for " : "None for ", activation),
         limit ? text(*limit) : "None");
  }
  if (alpha.has_value() != is_clamped || (alpha && !std::isfinite(*alpha))) {
    fail(op, "alpha", is_clamped ? "a number for clamped_silu" : text("None for ", activation),
         alpha ? text(*alpha) : "None");
  }
  return found;
}

Activation check_gated_activation(const Tensor& gate, const Tensor& up, std::string_view activation,
                                  std::optional<double> limit, std::optional<double> alpha) {
  const char* op = "gated_activation";
  if (!is_floating(gate.scalar_type()) || gate.dim() == 0)
    fail(op, "gate", text(kFloating, " [..., N]"), describe(gate));
  check_like({op, gate.device()}, "up", up, "gate", gate);
  return check_activation(op, activation, limit, alpha);
}

void check_write_cache(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                       const Tensor& start) {
  const char* op = "write_cache";
  if (!is_floating(keys.scalar_type()) || keys.dim() != 4)
    fail(op, "keys", text(kFloating, " [B, H, L, D]"), describe(keys));
  const Checker check{op, keys.device()};
  check.contiguous("keys", keys);
  const at::ScalarType dtype = keys.scalar_type();
  const auto has_shape_of = [&](const Tensor& tensor, const c10::SymInt& tokens) {
    return tensor.scalar_type() == dtype && tensor.dim() == 4 && tensor.sym_size(0) == keys.sym_size(0) &&
           tensor.sym_size(1) == keys.sym_size(1) && tensor.sym_size(2) == tokens;
  };
  if (!has_shape_of(values, keys.sym_size(2))) {
    fail(op, "values", text(dtype_name(dtype), " [B, H, L, any] with the B, H and L of keys ", keys.sym_sizes()),
         describe(values));
  }
  check.on_device("values", values);
  check.contiguous("values", values);
  const bool fits = k.dim() == 4 && k.sym_size(2) <= keys.sym_size(2);
  if (!fits || !has_shape_of(k, k.sym_size(2)) || k.sym_size(3) != keys.sym_size(3)) {
    fail(op, "k",
         text(dtype_name(dtype), " [B, H, S, D] with the B, H and D of keys ", keys.sym_sizes(), " and S of at most L"),
         describe(k));
  }
  check.on_device("k", k);
  if (!has_shape_of(v, k.sym_size(2)) || v.sym_size(3) != values.sym_size(3)) {
    fail(op, "v",
         text(dtype_name(dtype), " [B, H, S, DV] with the S of k and otherwise like values ", values.sym_sizes()),
         describe(v));
  }
  check.on_device("v", v);
  if (start.scalar_type() != at::kLong || start.dim() > 1 || start.sym_numel() != 1) {
    fail(op, "start", "int64 [] or [1]", describe(start));
  }
  check.on_device("start", start);
}

}  // namespace marlin
