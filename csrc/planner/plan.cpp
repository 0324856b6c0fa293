// Plans for the kernels with one thread per element, and the printing of plans.
#include "csrc/planner/plan.h"

#include <cstdlib>
#include <iostream>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>

#include "csrc/planner/builder.h"
#include "csrc/planner/estimate.h"

namespace marlin {

double seconds(const Plan& plan) {
  return std::accumulate(plan.dispatches.begin(), plan.dispatches.end(), 0.0,
                         [](double sum, const Dispatch& dispatch) { return sum + dispatch.seconds; });
}

Plan plan_dequantize(const DequantizeProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  check_weight("dequantize", weight);
  const double written = double(weight.K) * weight.N * element_bytes(problem.out);
  return {.dispatches = {{.instance = {Kernel::dequantize, weight.format, problem.out},
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.N, weight.K / kBlockK),
                          .threads = kElementwiseThreads,
                          .params = DequantizeParams{weight.N, weight.K, group_size(weight), 0},
                          .seconds = traffic_seconds(weight_bytes(weight) + written, device)}}};
}

Plan plan_embedding(const EmbeddingProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  check_weight("embedding", weight);
  if (problem.count == 0) refuse("embedding", "ids", "at least 1", "0");
  const double bytes_of_a_row = weight_bytes(weight) / weight.N + double(weight.K) * element_bytes(problem.out);
  return {.dispatches = {{.instance = {Kernel::embedding, weight.format, problem.out},
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.K / kBlockK, problem.count),
                          .threads = kElementwiseThreads,
                          .params = EmbeddingParams{weight.N, weight.K, group_size(weight), problem.count,
                                                    problem.wide_ids ? 8U : 4U},
                          .seconds = traffic_seconds(problem.count * bytes_of_a_row, device)}}};
}

Plan plan_repack(const RepackProblem& problem, const GpuDevice& device) {
  const std::string_view op = info(problem.kernel).name;
  if (info(problem.kernel).library != "weights/repack")
    refuse("repack", "kernel", "one of weights/repack", std::string(op));
  if (problem.rows == 0) refuse(op, "rows", "at least 1", "0");
  if (problem.columns == 0) refuse(op, "columns", "at least 1", "0");
  Dispatch dispatch{.instance = {problem.kernel},
                    .grid = elementwise_grid(problem.columns, problem.rows),
                    .threads = kElementwiseThreads,
                    .params = RepackParams{problem.rows, problem.columns, static_cast<int32_t>(problem.stored_zeros),
                                           problem.code_bits},
                    .seconds = traffic_seconds(double(problem.thread_bytes) * problem.rows * problem.columns, device)};
  dispatch.constants[kConstantHasPerm] = problem.has_perm;
  return {.dispatches = {std::move(dispatch)}};
}

Plan plan_probe() {
  return {.dispatches = {{.instance = {Kernel::probe_half_subnormals}}}};
}

Plan plan_tensor_probe() {
  return {
      .dispatches = {{.instance = {Kernel::probe_tensor_layout}, .grid = {1, 1, 1}, .threads = {kSimdWidth, 1, 1}}}};
}

std::string tensor_layout_refusal(const int32_t* words) {
  static constexpr std::array<std::string_view, 3> matrices{"left operand", "right operand", "sums"};
  for (int32_t i = 0; i < kTensorProbed; ++i) {
    const auto word = static_cast<uint32_t>(words[i]);
    if (word == kTensorMatches) continue;
    std::string text("the tensor units of this GPU hold the ");
    text.append(matrices.at(i % 3)).append(i < 3 ? " of float16" : " of bfloat16").append(" in an unknown layout: ");
    if ((word & kTensorElement) != 0) {
      text += "element " + std::to_string(word >> 16 & 0xFF) + " of lane " + std::to_string(word >> 24 & 0x1F) +
              " is in row " + std::to_string(word >> 8 & 0xFF) + ", column " + std::to_string(word & 0xFF);
    } else if ((word & kTensorCapacity) != 0) {
      text += "a lane has " + std::to_string(word & 0xFFFF) + " elements";
    } else {
      text += "the probe stored " + std::to_string(words[i]);
    }
    return text;
  }
  return "";
}

namespace {

std::ostream& operator<<(std::ostream& stream, const Extent& extent) {
  return stream << "(" << extent.x << ", " << extent.y << ", " << extent.z << ")";
}

struct PrintParams {
  std::ostream& stream;

  void operator()(std::monostate) const {}
  void operator()(const GemmParams& params) const {
    stream << ", M=" << params.M << " N=" << params.N << " K=" << params.K << " group_size=" << params.group_size
           << " k_per_slice=" << params.k_per_slice << " m_begin=" << params.m_begin
           << " a_row_stride=" << params.a_row_stride;
  }
  void operator()(const DequantizeParams& params) const {
    stream << ", N=" << params.N << " K=" << params.K << " group_size=" << params.group_size;
  }
  void operator()(const EmbeddingParams& params) const {
    stream << ", count=" << params.count << " id_bytes=" << params.id_bytes << " N=" << params.N << " K=" << params.K
           << " group_size=" << params.group_size;
  }
  void operator()(const ReduceParams& params) const {
    stream << ", M=" << params.M << " N=" << params.N << " splits=" << params.splits;
  }
  void operator()(const StripedReduceParams& params) const {
    stream << ", M=" << params.M << " N=" << params.N << " tile=" << params.tile_M << "x" << params.tile_N
           << " slices=" << params.slices << " stripes=" << params.stripes;
  }
  void operator()(const RepackParams& params) const {
    stream << ", rows=" << params.rows << " columns=" << params.columns << " stored_zeros=" << params.stored_zeros
           << " code_bits=" << params.code_bits;
  }
  void operator()(const MoeParams& params) const {
    (*this)(params.product);
    stream << " a_slot_stride=" << params.a_slot_stride << " experts=" << params.experts << " top_k=" << params.top_k
           << " id_bytes=" << params.id_bytes << " block_rows=" << params.block_rows << " blocks=" << params.blocks;
  }
  void operator()(const MoeReduceParams& params) const {
    stream << ", rows=" << params.rows << " N=" << params.N << " terms=" << params.terms
           << " experts=" << params.experts << " id_bytes=" << params.id_bytes
           << " row_weights_type=" << params.row_weights_type;
  }
  void operator()(const NormParams& params) const {
    stream << ", columns=" << params.columns << " has_residual=" << params.has_residual;
  }
  void operator()(const RotaryParams& params) const {
    stream << ", heads=" << params.q_heads << "+" << params.k_heads << " tokens=" << params.tokens
           << " head_size=" << params.head_size << " rotary_size=" << params.rotary_size << " flags=" << params.flags;
  }
  void operator()(const ActivationParams& params) const {
    stream << ", rows=" << params.rows << " columns=" << params.columns << " activation=" << params.activation;
  }
  void operator()(const CacheParams& params) const {
    stream << ", heads=" << params.heads << " tokens=" << params.tokens << " length=" << params.length
           << " sizes=" << params.k_size << "+" << params.v_size;
  }
  void operator()(const MlstmParams& params) const {
    stream << ", heads=" << params.heads << " S=" << params.S << " DK=" << params.DK << " DV=" << params.DV
           << " chunk_size=" << params.chunk_size << " chunks " << params.first_chunk << " to "
           << params.first_chunk + params.segment_chunks << " of " << params.chunks
           << " save_every=" << params.save_every << " flags=" << params.flags;
  }
};

}  // namespace

std::ostream& operator<<(std::ostream& stream, const Dispatch& dispatch) {
  stream << host_name(dispatch.instance) << ": grid " << dispatch.grid << " of " << dispatch.threads << " threads, "
         << dispatch.threadgroup_bytes << " bytes of threadgroup memory";
  std::visit(PrintParams{stream}, dispatch.params);
  stream << ", constants";
  for (int32_t constant : dispatch.constants)
    stream << " " << constant;
  return stream;
}

std::ostream& operator<<(std::ostream& stream, const Plan& plan) {
  const char* separator = "";
  for (const Dispatch& dispatch : plan.dispatches) {
    stream << separator << dispatch;
    separator = "\n  then ";
  }
  if (plan.dense_product) stream << separator << "torch.matmul";
  return stream;
}

void print_plan_once(const Plan& plan) {
  static const bool wanted = [] {
    const char* value = std::getenv("TORCH_MARLIN_METAL_PRINT_PLAN");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (!wanted) return;
  std::ostringstream text;
  text << plan;
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard lock(mutex);
  if (printed.insert(text.str()).second) std::cerr << "torch_marlin_metal plan: " << text.str() << std::endl;
}

}  // namespace marlin
