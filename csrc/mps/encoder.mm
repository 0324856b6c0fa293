#include "csrc/mps/encoder.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include "csrc/mps/gpu_failures.h"
#include "csrc/mps/pytorch_internals.h"

namespace marlin::mps {

namespace {

MTLSize size(const Extent& extent) {
  return MTLSizeMake(extent.x, extent.y, extent.z);
}

struct SetParams {
  id<MTLComputeCommandEncoder> encoder;

  void operator()(std::monostate) const {}
  template <typename Params>
  void operator()(const Params& params) const {
    [encoder setBytes:&params length:sizeof(params) atIndex:kSlotParams];
  }
};

// Returns a buffer for the slots of absent tensors, which kernels never access. Metal's API validation ends the process
// if a slot that the kernel declares is nil. Another tensor cannot fill the slot, because Metal would track it as used,
// and perhaps as written, by the kernel; this buffer is untracked. It has only 16 bytes, which the host never writes,
// so that the software device and Metal's shader validation report a stray access.
id<MTLBuffer> absent_tensor() {
  static constexpr NSUInteger kBytes = 16;
  static id<MTLBuffer> buffer = [] {
    const auto options =
        static_cast<MTLResourceOptions>(MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked);
    id<MTLBuffer> made = [device() newBufferWithLength:kBytes options:options];
    TORCH_CHECK(made != nil, "torch_marlin_metal: Metal has no memory for a buffer of ", kBytes, " bytes");
    return made;
  }();
  return buffer;
}

// Binds a buffer to every slot that the kernel declares. Otherwise a slot would keep the buffer of an earlier kernel of
// this package or of PyTorch.
void bind(id<MTLComputeCommandEncoder> encoder, const Dispatch& dispatch, const Bindings& bindings) {
  for (uint32_t rest = info(dispatch.instance.kernel).slots & ~MARLIN_SLOT(kSlotParams); rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const at::Tensor& tensor = bindings[slot];
    id<MTLBuffer> buffer = tensor.defined() ? buffer_of(tensor) : absent_tensor();
    [encoder setBuffer:buffer offset:tensor.defined() ? offset_of(tensor) : 0 atIndex:slot];
  }
  std::visit(SetParams{encoder}, dispatch.params);
}

std::vector<at::Tensor> defined(const Bindings& bindings) {
  std::vector<at::Tensor> tensors;
  std::copy_if(bindings.begin(), bindings.end(), std::back_inserter(tensors),
               [](const at::Tensor& tensor) { return tensor.defined(); });
  return tensors;
}

}  // namespace

uint32_t checked_size(const char* op, const char* name, int64_t size) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(size <= kLargest, "torch_marlin_metal::", op, ": ", name, ": expected at most ", kLargest,
                    " on mps, got ", size);
  return static_cast<uint32_t>(size);
}

void encode(const CompiledPlan& compiled, Bindings bindings) {
  raise_gpu_failure();
  // Each call allocates its workspaces anew, because an allocation from PyTorch's cache takes only microseconds. The
  // allocator may give a freed workspace to later work while this plan still runs. On the same stream this is safe,
  // because the later work runs after this plan. To another stream (torch 2.14 and later), the allocator gives freed
  // memory only when no running work uses it; softmetal/src/softmetal/apple/pytorch_calls.py checks this.
  const Extent& partials = compiled.plan.partials;
  if (partials.z != 0) {
    bindings[kSlotPartials] =
        at::empty({partials.z, partials.y, partials.x}, bindings[kSlotOut].options().dtype(at::kFloat));
  }

  if (const int64_t words = compiled.plan.block_words; words != 0) {
    bindings[kSlotBlocks] = at::empty({words}, bindings[kSlotOut].options().dtype(at::kInt));
  }

  // An Objective-C block captures C++ objects as const copies, so the block below captures pointers instead. The
  // pointers stay valid, because run_on_queue waits for the block.
  const CompiledPlan* launched = &compiled;
  const Bindings* bound = &bindings;
  run_on_queue(^{
    const std::vector<at::Tensor> tensors = is_profiling() ? defined(*bound) : std::vector<at::Tensor>();
    for (size_t i = 0; i < launched->plan.dispatches.size(); ++i) {
      const Dispatch& dispatch = launched->plan.dispatches[i];
      const CompiledKernel& kernel = launched->kernels[i];
      encode_profiled(kernel.pipeline, kernel.name, tensors, [&] {
        watch_kernel(kernel.name);
        id<MTLComputeCommandEncoder> encoder = marlin::mps::encoder();
        if (i != 0) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
        [encoder setComputePipelineState:kernel.pipeline];
        bind(encoder, dispatch, *bound);
        if (dispatch.threadgroup_bytes != 0) {
          [encoder setThreadgroupMemoryLength:dispatch.threadgroup_bytes atIndex:0];
        }
        [encoder dispatchThreadgroups:size(dispatch.grid) threadsPerThreadgroup:size(dispatch.threads)];
      });
      work_encoded(dispatch.seconds);
    }
  });
}

}  // namespace marlin::mps
