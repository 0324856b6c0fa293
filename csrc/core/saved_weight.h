// The tensors that an operator on a packed weight saves for its backward pass.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>

#include "csrc/core/weight_arguments.h"

namespace marlin {

// The packed weight, which the backward pass multiplies with the gradient, and other saved tensors. The weight itself
// has no derivative.
struct SavedWeight {
  OwnedWeight weight;
  torch::autograd::variable_list others;  // some may be undefined

  static void save(torch::autograd::AutogradContext* ctx, const WeightArguments& weight,
                   const torch::autograd::variable_list& others = {}) {
    torch::autograd::variable_list all;
    std::apply([&](const auto&... tensor) { (all.push_back(tensor), ...); }, weight.positional());
    std::apply([&](const auto&... tensor) { (all.push_back(tensor.value_or(Tensor())), ...); }, weight.optionals());
    all.insert(all.end(), others.begin(), others.end());
    ctx->save_for_backward(std::move(all));
    ctx->saved_data["weight_format"] = std::string(weight.weight_format);
    ctx->saved_data["group_size"] = weight.group_size;
  }

  static SavedWeight load(torch::autograd::AutogradContext* ctx) {
    const torch::autograd::variable_list all = ctx->get_saved_variables();
    auto next = all.begin();
    SavedWeight saved{};
    std::apply([&](auto&... tensor) { ((tensor = *next++), ...); }, saved.weight.positional());
    std::apply([&](auto&... tensor) { ((tensor = optional(*next++)), ...); }, saved.weight.optionals());
    saved.others.assign(next, all.end());
    saved.weight.weight_format = ctx->saved_data["weight_format"].toStringRef();
    saved.weight.group_size = ctx->saved_data["group_size"].toInt();
    return saved;
  }

  static OptionalTensor optional(const Tensor& saved) { return saved.defined() ? OptionalTensor(saved) : std::nullopt; }
};

}  // namespace marlin
