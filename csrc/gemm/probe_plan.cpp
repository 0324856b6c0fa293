#include "csrc/gemm/probe_plan.h"

#include <array>
#include <string_view>

namespace marlin {

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

}  // namespace marlin
