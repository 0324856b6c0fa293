// The mLSTM operators for MPS.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "csrc/mlstm/argument_rules.h"
#include "csrc/mlstm/gpu_plan.h"
#include "csrc/mps/encoder.h"
#include "csrc/planner/launch_cache.h"

namespace marlin::mps {
namespace {

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Returns the token stride of a tensor [B, H, S, ...]. Returns 0 for a single token, because its stride is arbitrary.
int64_t token_stride(const Tensor& tensor) {
  return tensor.size(2) > 1 ? tensor.stride(2) : 0;
}

// Converts q, k or v to a form that the kernels accept. Copies the tensor if its rows are not contiguous, or are too
// far apart for 32-bit offsets.
Tensor rows(const Tensor& tensor) {
  const bool is_near = tensor.dim() != 4 || token_stride(tensor) <= kMlstmMaxStride;
  return tensor.stride(-1) == 1 && is_near ? tensor : tensor.contiguous();
}

// Returns the strides of a tensor. The tensors of mlstm_step have no token dimension.
MlstmStrides strides(const Tensor& tensor, bool has_tokens) {
  return {tensor.stride(0), tensor.stride(1), has_tokens ? token_stride(tensor) : 0};
}

bool is_aligned(const Tensor& tensor) {
  return tensor.storage_offset() % 4 == 0;
}

// A plan with its pipelines, its number of chunks and its workspace.
struct CompiledMlstm {
  CompiledPlan compiled;
  uint32_t chunks;
  MlstmWorkspace workspace;
};

// The arguments of one call: the tensors to bind and the problem to plan.
struct Call {
  const char* op;
  MlstmLaunch launch;
  Bindings bindings;

  Call(const char* op, const MlstmShape& shape, int64_t chunk_size, double eps) : op(op) {
    launch.sizes = mlstm_problem(shape, chunk_size);
    launch.eps = static_cast<float>(eps);
    launch.vector_aligned = true;
    launch.vector_aligned_states = true;
  }

  bool has_no_outputs() const { return launch.sizes.B * launch.sizes.H == 0; }

  void bind_tokens(MlstmSlot slot, MlstmStrides& target, const Tensor& tensor) {
    const Tensor held = rows(tensor);
    target = strides(held, held.dim() == 4);
    launch.element = element_type(held);
    launch.vector_aligned = launch.vector_aligned && is_aligned(held);
    bindings[slot] = held;
  }

  void bind_gates(const Tensor& i, const Tensor& f) {
    launch.i = strides(i, i.dim() == 3);
    launch.f = strides(f, f.dim() == 3);
    launch.gates = element_type(i);
    bindings[kSlotI] = i;
    bindings[kSlotF] = f;
  }

  // Binds C, n and m as inputs.
  void bind_states(std::array<int, 3> slots, const Tensor& C, const Tensor& n, const Tensor& m) {
    const Tensor held_C = C.contiguous();
    const Tensor held_n = n.contiguous();
    launch.vector_aligned_states = is_aligned(held_C) && is_aligned(held_n);
    bindings[slots[0]] = held_C;
    bindings[slots[1]] = held_n;
    bindings[slots[2]] = m.contiguous();
  }

  void bind_initial(const MlstmInitial& initial) {
    if (!initial.C0) return;
    launch.has_initial_state = true;
    bind_states({kSlotC0, kSlotN0, kSlotM0}, *initial.C0, *initial.n0, *initial.m0);
  }

  // Returns the plan of this launch from the cache, or makes it. The arguments have been checked, so the planner's only
  // error here is a size beyond 32-bit offsets.
  template <MlstmPlan (*make_plan)(const MlstmLaunch&, const GpuDevice&)>
  std::shared_ptr<const CompiledMlstm> find_plan() const {
    static auto* plans = new LaunchCache<MlstmLaunch, CompiledMlstm>;  // one cache for each operator
    try {
      return plans->get(launch, [&] {
        MlstmPlan plan = make_plan(launch, gpu());
        return CompiledMlstm{compile(std::move(plan.plan)), plan.chunks, plan.workspace};
      });
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, "torch_marlin_metal::", op,
                        ": sizes: expected sizes that 32-bit offsets can address on mps, got B=", launch.sizes.B,
                        " H=", launch.sizes.H, " S=", launch.sizes.S, " DK=", launch.sizes.DK, " DV=", launch.sizes.DV,
                        " (", error.what(), ")");
    }
  }

  // Allocates the workspace for the gates and chunks.
  void bind_workspace(const CompiledMlstm& plan, const at::TensorOptions& floats) {
    bindings[kSlotGates] = at::empty({static_cast<int64_t>(plan.workspace.gates)}, floats);
    bindings[kSlotChunks] = at::empty({static_cast<int64_t>(plan.workspace.chunks)}, floats);
  }
};

ThreeTensors mlstm_states_mps(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                              int64_t chunk_size, int64_t save_states_every) {
  const MlstmInitial initial{C0, n0, m0};
  const MlstmShape shape = check_mlstm_states(k, v, i, f, initial, chunk_size, save_states_every);
  Call call("mlstm_states", shape, chunk_size, 0.0);
  const auto [B, H, S, DK, DV, ignored] = call.launch.sizes;
  const int64_t chunks = S / chunk_size;
  const int64_t slots = chunks / save_states_every + 1;
  const auto floats = k.options().dtype(at::kFloat);
  Tensor C = at::empty({B, H, slots, DK, DV}, floats);
  Tensor n = at::empty({B, H, slots, DK}, floats);
  Tensor m = at::empty({B, H, chunks + 1}, floats);
  if (call.has_no_outputs()) return {C, n, at::empty({B, H, slots}, floats)};
  if (S == 0) {
    if (!C0) return {C.zero_(), n.zero_(), m.zero_()};
    C.select(2, 0).copy_(*C0);
    n.select(2, 0).copy_(*n0);
    m.select(2, 0).copy_(*m0);
    return {C, n, m};
  }
  call.bind_tokens(kSlotK, call.launch.k, k);
  call.bind_tokens(kSlotV, call.launch.v, v);
  call.bind_gates(i, f);
  call.bind_initial(initial);
  call.launch.save_every = static_cast<uint32_t>(save_states_every);
  const auto plan = call.find_plan<plan_mlstm_states>();
  call.bind_workspace(*plan, floats);
  call.bindings[kSlotStatesC] = C;
  call.bindings[kSlotStatesN] = n;
  call.bindings[kSlotStatesM] = m;
  call.bindings[kSlotFinalC] = C.select(2, slots - 1);
  call.bindings[kSlotFinalN] = n.select(2, slots - 1);
  call.bindings[kSlotFinalM] = m.select(2, chunks);
  encode(plan->compiled, std::move(call.bindings));
  if (save_states_every != 1) m = m.slice(2, 0, chunks + 1, save_states_every).contiguous();
  return {C, n, m};
}

ThreeTensors mlstm_output_mps(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps) {
  const MlstmShape shape = check_mlstm_output(q, k, v, i, f, C, n, m, chunk_size, eps);
  Call call("mlstm_output", shape, chunk_size, eps);
  const auto [B, H, S, DK, DV, ignored] = call.launch.sizes;
  Tensor h = at::empty({B, H, S, DV}, q.options());
  Tensor N = at::empty({B, H, S}, m.options());
  Tensor M = at::empty({B, H, S}, m.options());
  if (M.numel() == 0) return {h, N, M};
  call.bind_tokens(kSlotQ, call.launch.q, q);
  call.bind_tokens(kSlotK, call.launch.k, k);
  call.bind_tokens(kSlotV, call.launch.v, v);
  call.bind_gates(i, f);
  call.bind_states({kSlotStatesC, kSlotStatesN, kSlotStatesM}, C, n, m);
  const auto plan = call.find_plan<plan_mlstm_output>();
  call.bind_workspace(*plan, m.options());
  call.bindings[kSlotH] = h;
  call.bindings[kSlotOutN] = N;
  call.bindings[kSlotOutM] = M;
  encode(plan->compiled, std::move(call.bindings));
  return {h, N, M};
}

FourTensors mlstm_mps(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                      const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0, int64_t chunk_size,
                      double eps) {
  const MlstmInitial initial{C0, n0, m0};
  const MlstmShape shape = check_mlstm(q, k, v, i, f, initial, chunk_size, eps);
  Call call("mlstm", shape, chunk_size, eps);
  const auto [B, H, S, DK, DV, ignored] = call.launch.sizes;
  const auto floats = q.options().dtype(at::kFloat);
  Tensor h = at::empty({B, H, S, DV}, q.options());
  Tensor C = at::empty({B, H, DK, DV}, floats);
  Tensor n = at::empty({B, H, DK}, floats);
  Tensor m = at::empty({B, H}, floats);
  if (call.has_no_outputs()) return {h, C, n, m};
  if (S == 0) {
    if (!C0) return {h, C.zero_(), n.zero_(), m.zero_()};
    return {h, C.copy_(*C0), n.copy_(*n0), m.copy_(*m0)};
  }
  call.bind_tokens(kSlotQ, call.launch.q, q);
  call.bind_tokens(kSlotK, call.launch.k, k);
  call.bind_tokens(kSlotV, call.launch.v, v);
  call.bind_gates(i, f);
  call.bind_initial(initial);
  const auto plan = call.find_plan<plan_mlstm>();
  call.bind_workspace(*plan, floats);
  const int64_t slots = plan->workspace.state_slots;
  call.bindings[kSlotH] = h;
  call.bindings[kSlotOutN] = at::empty({B, H, S}, floats);
  call.bindings[kSlotOutM] = at::empty({B, H, S}, floats);
  call.bindings[kSlotStatesC] = at::empty({B, H, slots, DK, DV}, floats);
  call.bindings[kSlotStatesN] = at::empty({B, H, slots, DK}, floats);
  call.bindings[kSlotStatesM] = at::empty({B, H, int64_t{plan->chunks} + 1}, floats);
  call.bindings[kSlotFinalC] = C;
  call.bindings[kSlotFinalN] = n;
  call.bindings[kSlotFinalM] = m;
  encode(plan->compiled, std::move(call.bindings));
  return {h, C, n, m};
}

FourTensors mlstm_step_mps(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                           const Tensor& C, const Tensor& n, const Tensor& m, double eps) {
  const MlstmShape shape = check_mlstm_step(q, k, v, i, f, C, n, m, eps);
  Call call("mlstm_step", shape, 0, eps);
  Tensor h = at::empty(v.sizes(), q.options());
  Tensor next_C = at::empty(C.sizes(), C.options());
  Tensor next_n = at::empty(n.sizes(), n.options());
  Tensor next_m = at::empty(m.sizes(), m.options());
  if (call.has_no_outputs()) return {h, next_C, next_n, next_m};
  call.bind_tokens(kSlotQ, call.launch.q, q);
  call.bind_tokens(kSlotK, call.launch.k, k);
  call.bind_tokens(kSlotV, call.launch.v, v);
  call.bind_gates(i, f);
  call.bind_states({kSlotC0, kSlotN0, kSlotM0}, C, n, m);
  call.bindings[kSlotH] = h;
  call.bindings[kSlotFinalC] = next_C;
  call.bindings[kSlotFinalN] = next_n;
  call.bindings[kSlotFinalM] = next_m;
  encode(call.find_plan<plan_mlstm_step>()->compiled, std::move(call.bindings));
  return {h, next_C, next_n, next_m};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, MPS, m) {
  m.impl("mlstm_states", mlstm_states_mps);
  m.impl("mlstm_output", mlstm_output_mps);
  m.impl("mlstm", mlstm_mps);
  m.impl("mlstm_step", mlstm_step_mps);
}

}  // namespace marlin::mps
