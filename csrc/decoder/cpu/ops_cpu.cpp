// The decoder layer's operators (norms, rotary, gated activation, cache) for the CPU. They convert rows to fp32 with
// the converters of the GEMM kernels, in blocks that stay in the cache.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "csrc/core/math.h"
#include "csrc/core/tensor_checks.h"
#include "csrc/core/tensor_views.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/parallel.h"
#include "csrc/decoder/argument_rules.h"
#include "csrc/decoder/cpu/kernel_table.h"

namespace marlin::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // the least number of elements per thread

const KernelSet& kernels() {
  static const KernelSet& set = *kernels_of(capability().isa);
  return set;
}

const DecoderFunctions& functions() {
  static const DecoderFunctions& table = decoder_functions(capability().isa);
  return table;
}

// Returns the weight in fp32 with the offset added. Fills `buffer` unless the tensor already holds these values.
const float* whole_weight(const Tensor& weight, double offset, std::vector<float>& buffer) {
  if (offset == 0 && weight.scalar_type() == at::kFloat) return weight.const_data_ptr<float>();
  buffer.resize(static_cast<size_t>(weight.numel()));
  kernels().to_float(weight.const_data_ptr(), element_type(weight), weight.numel(), buffer.data());
  for (float& element : buffer)
    element += static_cast<float>(offset);
  return buffer.data();
}

// Computes rows of fp32 in place, and other rows in a buffer.
void norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset, const Tensor& y,
          const Tensor& sum) {
  const Tensor values = with_unit_stride(as_rows(x));
  const Tensor added = residual.defined() ? with_unit_stride(as_rows(residual)) : Tensor();
  const Tensor stored_weight = weight.contiguous();
  const ElementType type = element_type(values);
  const bool is_wide = type == ElementType::float32;
  const int64_t N = values.size(1);
  std::vector<float> wide_weight;
  const float* weights = whole_weight(stored_weight, offset, wide_weight);
  void* out = y.mutable_data_ptr();
  void* sums = sum.defined() ? sum.mutable_data_ptr() : nullptr;
  at_parallel().run(values.size(0), ceil_divide(kGrain, N), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(is_wide ? 0 : N));
    std::vector<float> other(static_cast<size_t>(is_wide || sums == nullptr ? 0 : N));
    const auto widened = [&](const Tensor& tensor, int64_t m, std::vector<float>& to) {
      const char* from = element_at(tensor.const_data_ptr(), type, m * tensor.stride(0));
      if (is_wide) return reinterpret_cast<const float*>(from);
      kernels().to_float(from, type, N, to.data());
      return static_cast<const float*>(to.data());
    };
    for (int64_t m = begin; m < end; ++m) {
      const float* row = widened(values, m, buffer);
      if (sums != nullptr) {
        char* stored = element_at(sums, type, m * N);
        float* total = is_wide ? reinterpret_cast<float*>(stored) : buffer.data();
        functions().add_rows(row, widened(added, m, other), N, total);
        if (!is_wide) {  // the norm is computed from the rounded sum
          kernels().from_float(total, type, N, stored);
          kernels().to_float(stored, type, N, total);
        }
        row = total;
      }
      const double squares = functions().sum_of_squares(row, N);
      const auto factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(N) + eps));
      char* result = element_at(out, type, m * N);
      functions().scale_row(row, factor, weights, N, is_wide ? reinterpret_cast<float*>(result) : buffer.data());
      if (!is_wide) kernels().from_float(buffer.data(), type, N, result);
    }
  });
}

Tensor rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps, double offset) {
  check_rms_norm("rms_norm", x, std::nullopt, weight, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() != 0) norm(x, Tensor(), weight, eps, offset, y, Tensor());
  return y;
}

TwoTensors add_rms_norm_cpu(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset) {
  check_rms_norm("add_rms_norm", x, residual, weight, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor sum = at::empty(x.sizes(), x.options());
  if (y.numel() != 0) norm(x, residual, weight, eps, offset, y, sum);
  return {y, sum};
}

// The arguments of one call of rotary.
struct Rotation {
  Tensor cos;  // [1 or batches, tokens, R or R/2], unit stride
  Tensor sin;
  int64_t rotary_size;
  bool interleaved;
  bool per_pair;
  bool transposed;

  // The cosines and sines of one token: one element for each rotated element. The sines include their signs.
  struct Token {
    std::vector<float> cos;
    std::vector<float> sin;
    std::vector<float> buffer;
  };

  const float* widened(const Tensor& table, int64_t batch, int64_t token, std::vector<float>& buffer) const {
    const int64_t at = (table.size(0) == 1 ? 0 : batch * table.stride(0)) + token * table.stride(1);
    const ElementType type = element_type(table);
    const char* from = element_at(table.const_data_ptr(), type, at);
    if (type == ElementType::float32) return reinterpret_cast<const float*>(from);
    buffer.resize(static_cast<size_t>(table.size(2)));
    kernels().to_float(from, type, table.size(2), buffer.data());
    return buffer.data();
  }

  void find(int64_t batch, int64_t token, Token& to) const {
    const int64_t pairs = rotary_size / 2;
    const int64_t step = interleaved ? 2 : 1;
    const int64_t apart = interleaved ? 1 : pairs;
    const float* c = widened(cos, batch, token, to.buffer);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t i = pair * step;
      to.cos[i] = c[per_pair ? pair : i];
      to.cos[i + apart] = c[per_pair ? pair : i + apart];
    }
    const float* s = widened(sin, batch, token, to.buffer);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t i = pair * step;
      const float of_i = s[per_pair ? pair : i];
      const float of_j = s[per_pair ? pair : i + apart];
      to.sin[i] = transposed ? of_j : -of_i;
      to.sin[i + apart] = transposed ? -of_i : of_j;
    }
  }

  // Rotates all heads of a token together, because the heads share the tables and are usually adjacent in memory.
  void run(const Tensor& in, const Tensor& out) const {
    const Tensor held = with_unit_stride(in);
    const ElementType type = element_type(held);
    const bool is_wide = type == ElementType::float32;
    const int64_t heads = held.size(1);
    const int64_t tokens = held.size(2);
    const int64_t head_size = held.size(3);
    void* to = out.mutable_data_ptr();
    at_parallel().run(held.size(0) * tokens * heads, ceil_divide(kGrain, head_size), [&](int64_t begin, int64_t end) {
      Token tables{std::vector<float>(rotary_size), std::vector<float>(rotary_size), {}};
      std::vector<float> before(static_cast<size_t>(is_wide ? 0 : heads * head_size));
      std::vector<float> after(before.size());
      for (int64_t row = begin; row < end;) {
        const int64_t head = row % heads;
        const int64_t token = row / heads % tokens;
        const int64_t batch = row / heads / tokens;
        const int64_t count = std::min(end - row, heads - head);
        find(batch, token, tables);
        const auto part = [&](const Tensor& tensor) {
          return batch * tensor.stride(0) + head * tensor.stride(1) + token * tensor.stride(2);
        };
        // Calls convert(first head, number of elements) for each run of heads that are adjacent in memory.
        const auto by_neighbours = [&](const Tensor& tensor, auto&& convert) {
          const int64_t together = tensor.stride(1) == head_size ? count : 1;
          for (int64_t h = 0; h < count; h += together)
            convert(h, together * head_size);
        };
        if (!is_wide) {
          by_neighbours(held, [&](int64_t h, int64_t elements) {
            const char* from = element_at(held.const_data_ptr(), type, part(held) + h * held.stride(1));
            kernels().to_float(from, type, elements, before.data() + h * head_size);
          });
        }
        for (int64_t h = 0; h < count; ++h) {
          const float* x = is_wide ? reinterpret_cast<const float*>(
                                         element_at(held.const_data_ptr(), type, part(held) + h * held.stride(1)))
                                   : before.data() + h * head_size;
          float* y = is_wide ? reinterpret_cast<float*>(element_at(to, type, part(out) + h * out.stride(1)))
                             : after.data() + h * head_size;
          functions().rotate_row({.x = x,
                                  .cos = tables.cos.data(),
                                  .sin = tables.sin.data(),
                                  .pairs = rotary_size / 2,
                                  .interleaved = interleaved,
                                  .out = y});
          std::copy(x + rotary_size, x + head_size, y + rotary_size);
        }
        if (!is_wide) {
          by_neighbours(out, [&](int64_t h, int64_t elements) {
            kernels().from_float(after.data() + h * head_size, type, elements,
                                 element_at(to, type, part(out) + h * out.stride(1)));
          });
        }
        row += count;
      }
    });
  }
};

TwoTensors rotary_cpu(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved,
                      bool per_pair, bool transposed) {
  const int64_t rotary_size = check_rotary(q, k, cos, sin, per_pair).expect_int();
  Tensor q_out = empty_rotated(q);
  Tensor k_out = empty_rotated(k);
  const Rotation rotation{.cos = with_unit_stride(cos),
                          .sin = with_unit_stride(sin),
                          .rotary_size = rotary_size,
                          .interleaved = interleaved,
                          .per_pair = per_pair,
                          .transposed = transposed};
  if (q_out.numel() != 0) rotation.run(q, q_out);
  if (k_out.numel() != 0) rotation.run(k, k_out);
  return {q_out, k_out};
}

Tensor gated_activation_cpu(const Tensor& gate, const Tensor& up, std::string_view activation,
                            std::optional<double> limit, std::optional<double> alpha) {
  const Activation kind = check_gated_activation(gate, up, activation, limit, alpha);
  Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Tensor gates = with_unit_stride(as_rows(gate));
  const Tensor ups = with_unit_stride(as_rows(up));
  const ElementType type = element_type(gates);
  const int64_t N = gates.size(1);
  const int64_t blocks = ceil_divide(N, kActivationBlock);
  void* to = out.mutable_data_ptr();
  at_parallel().run(gates.size(0) * blocks, kGrain / kActivationBlock, [&](int64_t begin, int64_t end) {
    float g[kActivationBlock] = {};
    float u[kActivationBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block / blocks;
      const int64_t column = block % blocks * kActivationBlock;
      const int64_t count = std::min<int64_t>(kActivationBlock, N - column);
      const char* from_gate = element_at(gates.const_data_ptr(), type, row * gates.stride(0) + column);
      const char* from_up = element_at(ups.const_data_ptr(), type, row * ups.stride(0) + column);
      char* result = element_at(to, type, row * N + column);
      // Whole vectors of fp32 need no buffer.
      const bool is_direct = type == ElementType::float32 && count % kActivationUnit == 0;
      if (!is_direct) {
        kernels().to_float(from_gate, type, count, g);
        kernels().to_float(from_up, type, count, u);
      }
      functions().activate(kind, {.gate = is_direct ? reinterpret_cast<const float*>(from_gate) : g,
                                  .up = is_direct ? reinterpret_cast<const float*>(from_up) : u,
                                  .out = is_direct ? reinterpret_cast<float*>(result) : g,
                                  .count = static_cast<int>(count),
                                  .limit = static_cast<float>(limit.value_or(0)),
                                  .alpha = static_cast<float>(alpha.value_or(0))});
      if (!is_direct) kernels().from_float(g, type, count, result);
    }
  });
  return out;
}

// Copies `tensor` [B, H, S, D] to tokens `start` to start + S - 1 of `cache` [B, H, L, D].
void copy_tokens(const Tensor& cache, const Tensor& tensor, int64_t start) {
  const Tensor held = with_unit_stride(tensor);
  const ElementType type = element_type(held);
  const int64_t tokens = held.size(2);
  const int64_t heads = held.size(1);
  const int64_t size = held.size(3);
  const int64_t length = cache.size(2);
  void* to = cache.mutable_data_ptr();
  at_parallel().run(held.size(0) * heads * tokens, ceil_divide(kGrain, size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row % tokens;
      const int64_t head = row / tokens;  // counted over all batches
      const int64_t from = head / heads * held.stride(0) + head % heads * held.stride(1) + token * held.stride(2);
      std::memcpy(element_at(to, type, (head * length + start + token) * size),
                  element_at(held.const_data_ptr(), type, from), static_cast<size_t>(size * element_bytes(type)));
    }
  });
}

void write_cache_cpu(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v, const Tensor& start) {
  check_write_cache(keys, values, k, v, start);
  const int64_t first = *start.const_data_ptr<int64_t>();
  const int64_t last = keys.size(2) - k.size(2);
  if (first < 0 || first > last) {
    fail("write_cache", "start", text("0 to L - S = ", last), text(first));
  }
  if (k.numel() != 0) copy_tokens(keys, k, first);
  if (v.numel() != 0) copy_tokens(values, v, first);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("rms_norm", rms_norm_cpu);
  m.impl("add_rms_norm", add_rms_norm_cpu);
  m.impl("rotary", rotary_cpu);
  m.impl("gated_activation", gated_activation_cpu);
  m.impl("write_cache", write_cache_cpu);
}

}  // namespace marlin::cpu
