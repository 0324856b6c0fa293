// Prints plans as text.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>

#include "csrc/planner/plan.h"

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
  void operator()(const MoeParams& params) const {
    (*this)(params.product);
    stream << " a_slot_stride=" << params.a_slot_stride << " experts=" << params.experts << " top_k=" << params.top_k
           << " block_rows=" << params.block_rows << " blocks=" << params.blocks;
  }
  // Prints the parameters of any other kernel as 32-bit words.
  template <typename Params>
  void operator()(const Params& params) const {
    std::array<int32_t, sizeof(Params) / sizeof(int32_t)> words{};
    std::memcpy(words.data(), &params, sizeof(params));
    stream << ", parameters";
    for (int32_t word : words)
      stream << " " << word;
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
