// Autocast for the operators that multiply activations with a packed weight.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "csrc/core/weight_arguments.h"

namespace marlin {

template <class Signature>
struct Autocast;

template <class... Rest>
struct Autocast<Tensor(const Tensor&, Rest...)> {
  // Casts `a` to autocast's dtype, as PyTorch does for linear. The packed weight, scales and zeros keep their dtypes.
  // The kernels add the bias in fp32, so it keeps its dtype, too.
  template <auto find_op, c10::DispatchKey key, c10::DeviceType device>
  static Tensor call(const Tensor& a, Rest... rest) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key);
    const Tensor cast = at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), a, device);
    return find_op().call(cast, std::forward<Rest>(rest)...);
  }

  template <auto find_op>
  static constexpr auto cpu = weight_kernel<call<find_op, c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>>;
  template <auto find_op>
  static constexpr auto mps = weight_kernel<call<find_op, c10::DispatchKey::AutocastMPS, c10::DeviceType::MPS>>;
};

}  // namespace marlin
