// The mps random generator, which uses the CPU generator's engine.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "torch_device.h"

namespace softmetal {

class MpsGenerator final : public at::CPUGeneratorImpl {
 public:
  explicit MpsGenerator(uint64_t seed) : CPUGeneratorImpl(seed) {
    device_ = c10::Device(c10::DeviceType::MPS, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::MPS);
  }
  static c10::DeviceType device_type() { return c10::DeviceType::MPS; }

 private:
  MpsGenerator* clone_impl() const override {
    auto copy = std::make_unique<MpsGenerator>(current_seed());
    copy->set_state(*get_state());
    return copy.release();
  }
};

const at::Generator& default_generator();

}  // namespace softmetal
