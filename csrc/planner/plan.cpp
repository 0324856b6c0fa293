// Plans in words, for people and for TORCH_MARLIN_METAL_PRINT_PLAN=1.
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>

#include "plan.h"

namespace marlin {

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
  void operator()(const ReduceParams& params) const {
    stream << ", M=" << params.M << " N=" << params.N << " slices=" << params.slices;
  }
  void operator()(const StripedReduceParams& params) const {
    stream << ", M=" << params.M << " N=" << params.N << " tile=" << params.tile_M << "x" << params.tile_N
           << " slices=" << params.slices << " stripes=" << params.stripes;
  }
  void operator()(const RepackParams& params) const {
    stream << ", rows=" << params.rows << " columns=" << params.columns << " stored_zeros=" << params.stored_zeros;
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
  stream << dispatch.function << ": grid " << dispatch.grid << " of " << dispatch.threads << " threads, "
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
