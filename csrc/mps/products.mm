#include "csrc/mps/products.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/mps/library.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/planner/commit_policy.h"

namespace marlin::mps {
namespace {

// Products of at most this many rows are not divided. The first part of a larger product has a multiple of this number
// of rows, because a dispatch of 64 rows uses the GPU well.
constexpr int64_t kFewestRows = 64;

std::atomic<bool> tensor_units_failed{false};

}  // namespace

uint32_t grid_size(const char* op, const char* name, int64_t size) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(size <= kLargest, "torch_marlin_metal::", op, ": ", name, ": expected at most ", kLargest,
                    " on mps, got ", size);
  return static_cast<uint32_t>(size);
}

bool is_aligned(const Tensor& tensor, int64_t elements) {
  return tensor.storage_offset() % elements == 0;
}

Tensor held(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

WeightProblem bind_weight(const char* op, const WeightTensors& weight, const WeightShape& shape, Bindings& bindings) {
  bindings[kSlotPacked] = weight.b_packed;
  bindings[kSlotScales] = weight.scales.contiguous();
  bindings[kSlotZeros] = held(weight.zeros);
  bindings[kSlotGlobalScale] = held(weight.global_scale);
  bindings[kSlotLut] = held(weight.lut);
  bindings[kSlotPerm] = held(weight.perm);
  const uint32_t K = grid_size(op, "K", shape.K.expect_int());
  return {.format = shape.format,
          .K = K,
          .N = grid_size(op, "N", shape.N.expect_int()),
          .group_size = static_cast<uint32_t>(std::min<int64_t>(weight.group_size, K)),
          .scales = element_type(weight.scales),
          .zeros = weight.zeros ? element_type(*weight.zeros) : ElementType::float16,
          .has_perm = weight.perm.has_value(),
          .has_global_scale = weight.global_scale.has_value(),
          .global_scale_per_column = weight.global_scale && weight.global_scale->numel() > shape.E.expect_int(),
          .vector_aligned = is_aligned(weight.b_packed, 4) && is_aligned(bindings[kSlotScales], 4) &&
                            (!weight.zeros || is_aligned(bindings[kSlotZeros], 4))};
}

bool half_subnormals(const Tensor& like) {
  static const bool answer = [&] {
    Bindings bindings;
    bindings[kSlotPacked] = at::ones({1}, like.options().dtype(at::kInt));
    bindings[kSlotOut] = at::empty({1}, like.options().dtype(at::kInt));
    encode(compile(plan_probe()), bindings);
    return bindings[kSlotOut].item<int32_t>() == 1;
  }();
  return answer;
}

GpuDevice this_gpu(const Tensor& like) {
  (void)commit_seconds();  // raises here, before anything is encoded, if the environment variable is wrong
  GpuDevice device = gpu_device(gpu_name(), gpu_core_count(), gpu_family());
  set_system(device, metal_system());
  device.half_subnormals = half_subnormals(like);
  return device;
}

GpuDevice without_tensor_units(GpuDevice device) {
  device.tensor_units = false;
  return device;
}

std::shared_ptr<const CompiledPlan> with_or_without_tensor_units(
    std::string_view variant, c10::function_ref<std::shared_ptr<const CompiledPlan>(bool)> find) {
  try {
    if (tensor_units_failed && variant == "auto") return find(false);
    try {
      return find(true);
    } catch (const NoTensorKernel& error) {
      TORCH_CHECK(variant == "auto", "torch_marlin_metal: ", error.what());
      if (!tensor_units_failed.exchange(true)) {
        TORCH_WARN("torch_marlin_metal: products use the other kernels, because ", error.what());
      }
      return find(false);
    }
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

int64_t first_part(const Plan& plan, int64_t M) {
  if (plan.seconds <= longest_plan_seconds() || M <= kFewestRows) return M;
  return round_up(M / 2, kFewestRows);
}

}  // namespace marlin::mps
