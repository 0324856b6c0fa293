// The operators between the products of a decoder layer, for the CPU. Rows are converted to fp32 in blocks that stay in
// the cache, by the converters of the GEMM kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "csrc/core/math.h"
#include "csrc/cpu/gemm/kernel_table.h"
#include "csrc/cpu/parallel.h"
#include "csrc/layer/argument_rules.h"
#include "csrc/layer/cpu/activation_table.h"
#include "csrc/ops/tensor_checks.h"

namespace marlin::cpu {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr int64_t kBlock = 512;      // so many squares are added in fp32, and these sums in fp64
constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

const KernelSet& kernels() {
  static const KernelSet& set = *kernels_of(capability().isa);
  return set;
}

const char* place(const void* data, ElementType type, int64_t index) {
  return static_cast<const char*>(data) + index * element_bytes(type);
}

char* place(void* data, ElementType type, int64_t index) {
  return static_cast<char*>(data) + index * element_bytes(type);
}

Tensor rows(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

Tensor unit_stride(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// Adds the squares to 16 partial sums, so that the compiler can use vectors. The partial sums are added in fp64.
double sum_of_squares(const float* x, int64_t count) {
  constexpr int kPartialSums = 16;
  float sums[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums)
    for (int c = 0; c < kPartialSums; ++c)
      sums[c] += x[i + c] * x[i + c];
  double total = 0;
  for (float sum : sums)
    total += static_cast<double>(sum);
  for (; i < count; ++i)
    total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

void norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset, const Tensor& y,
          const Tensor& sum) {
  const Tensor values = unit_stride(rows(x));
  const Tensor added = residual.defined() ? unit_stride(rows(residual)) : Tensor();
  const Tensor stored_weight = weight.contiguous();
  const ElementType type = element_type(values);
  const int64_t N = values.size(1);
  std::vector<float> weights(static_cast<size_t>(N));
  kernels().to_float(stored_weight.const_data_ptr(), element_type(stored_weight), N, weights.data());
  for (float& element : weights)
    element += static_cast<float>(offset);
  void* out = y.mutable_data_ptr();
  void* sums = sum.defined() ? sum.mutable_data_ptr() : nullptr;
  at_parallel().run(values.size(0), ceil_divide(kGrain, N), [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(N));
    std::vector<float> other(static_cast<size_t>(sums == nullptr ? 0 : N));
    for (int64_t m = begin; m < end; ++m) {
      kernels().to_float(place(values.const_data_ptr(), type, m * values.stride(0)), type, N, row.data());
      if (sums != nullptr) {
        kernels().to_float(place(added.const_data_ptr(), type, m * added.stride(0)), type, N, other.data());
        for (int64_t i = 0; i < N; ++i)
          row[i] += other[i];
        kernels().from_float(row.data(), type, N, place(sums, type, m * N));
        kernels().to_float(place(sums, type, m * N), type, N, row.data());  // the norm is computed from the rounded sum
      }
      double squares = 0;
      for (int64_t i = 0; i < N; i += kBlock)
        squares += sum_of_squares(row.data() + i, std::min(kBlock, N - i));
      const auto factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(N) + eps));
      for (int64_t i = 0; i < N; ++i)
        row[i] = row[i] * factor * weights[i];
      kernels().from_float(row.data(), type, N, place(out, type, m * N));
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

// One call of rotary. Tables are in fp32, [batches, tokens, rotary_size], one element per rotated element.
struct Rotation {
  const float* cos;
  const float* sin;
  int64_t table_batch;  // stride
  int64_t tokens;
  int64_t head_size;
  int64_t rotary_size;
  bool interleaved;
  bool transposed;

  void rotate(const float* x, const float* c, const float* s, float* out) const {
    const int64_t pairs = rotary_size / 2;
    const int64_t step = interleaved ? 2 : 1;
    const int64_t apart = interleaved ? 1 : pairs;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t i = pair * step;
      const int64_t j = i + apart;
      const float to_i = transposed ? s[j] : -s[i];
      const float to_j = transposed ? -s[i] : s[j];
      out[i] = x[i] * c[i] + x[j] * to_i;
      out[j] = x[j] * c[j] + x[i] * to_j;
    }
    std::copy(x + rotary_size, x + head_size, out + rotary_size);
  }

  void run(const Tensor& in, const Tensor& out) const {
    const Tensor held = unit_stride(in);
    const ElementType type = element_type(held);
    const int64_t heads = held.size(1);
    void* to = out.mutable_data_ptr();
    at_parallel().run(held.size(0) * heads * tokens, ceil_divide(kGrain, head_size), [&](int64_t begin, int64_t end) {
      std::vector<float> x(static_cast<size_t>(head_size));
      std::vector<float> y(static_cast<size_t>(head_size));
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = row % tokens;
        const int64_t head = row / tokens % heads;
        const int64_t batch = row / tokens / heads;
        const int64_t from = batch * held.stride(0) + head * held.stride(1) + token * held.stride(2);
        kernels().to_float(place(held.const_data_ptr(), type, from), type, head_size, x.data());
        const int64_t table = batch * table_batch + token * rotary_size;
        rotate(x.data(), cos + table, sin + table, y.data());
        const int64_t rotated = batch * out.stride(0) + head * out.stride(1) + token * out.stride(2);
        kernels().from_float(y.data(), type, head_size, place(to, type, rotated));
      }
    });
  }
};

// Returns cos or sin as contiguous fp32 with one entry per rotated element, also if the table has one entry per pair.
Tensor whole_table(const Tensor& table, bool per_pair, bool interleaved) {
  Tensor wide = table.to(at::kFloat).contiguous();
  if (!per_pair) return wide;
  if (!interleaved) return wide.repeat({1, 1, 2});
  return wide.unsqueeze(-1).expand({-1, -1, -1, 2}).flatten(2);
}

TwoTensors rotary_cpu(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved,
                      bool per_pair, bool transposed) {
  const int64_t rotary_size = check_rotary(q, k, cos, sin, per_pair).expect_int();
  Tensor q_out = empty_rotated(q);
  Tensor k_out = empty_rotated(k);
  if (q_out.numel() + k_out.numel() == 0) return {q_out, k_out};
  const Tensor whole_cos = whole_table(cos, per_pair, interleaved);
  const Tensor whole_sin = whole_table(sin, per_pair, interleaved);
  const Rotation rotation{.cos = whole_cos.const_data_ptr<float>(),
                          .sin = whole_sin.const_data_ptr<float>(),
                          .table_batch = cos.size(0) == 1 ? 0 : q.size(2) * rotary_size,
                          .tokens = q.size(2),
                          .head_size = q.size(3),
                          .rotary_size = rotary_size,
                          .interleaved = interleaved,
                          .transposed = transposed};
  if (q_out.numel() != 0) rotation.run(q, q_out);
  if (k_out.numel() != 0) rotation.run(k, k_out);
  return {q_out, k_out};
}

// Returns the tensor, or a copy if the elements of a row are not adjacent in memory.
Tensor neighbours(const Tensor& tensor) {
  return unit_stride(rows(tensor));
}

Tensor gated_activation_cpu(const Tensor& gate, const Tensor& up, c10::string_view activation,
                            std::optional<double> limit, std::optional<double> alpha) {
  const Activation kind = check_gated_activation(gate, up, activation, limit, alpha);
  Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Tensor gates = neighbours(gate);
  const Tensor ups = neighbours(up);
  const ElementType type = element_type(gates);
  const int64_t N = gates.size(1);
  const int64_t blocks = ceil_divide(N, kActivationBlock);
  static const ActivationFunction activate = activation_of(capability().isa);
  void* to = out.mutable_data_ptr();
  at_parallel().run(gates.size(0) * blocks, kGrain / kActivationBlock, [&](int64_t begin, int64_t end) {
    float g[kActivationBlock] = {};
    float u[kActivationBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block / blocks;
      const int64_t column = block % blocks * kActivationBlock;
      const int64_t count = std::min<int64_t>(kActivationBlock, N - column);
      kernels().to_float(place(gates.const_data_ptr(), type, row * gates.stride(0) + column), type, count, g);
      kernels().to_float(place(ups.const_data_ptr(), type, row * ups.stride(0) + column), type, count, u);
      activate(kind, {.gate = g,
                      .up = u,
                      .count = static_cast<int>(count),
                      .limit = static_cast<float>(limit.value_or(0)),
                      .alpha = static_cast<float>(alpha.value_or(0))});
      kernels().from_float(g, type, count, place(to, type, row * N + column));
    }
  });
  return out;
}

// Copies tensor [B, H, S, D] to the tokens from `start` on of cache [B, H, L, D].
void copy_tokens(const Tensor& cache, const Tensor& tensor, int64_t start) {
  const Tensor held = unit_stride(tensor);
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
      std::memcpy(place(to, type, (head * length + start + token) * size), place(held.const_data_ptr(), type, from),
                  static_cast<size_t>(size * element_bytes(type)));
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
