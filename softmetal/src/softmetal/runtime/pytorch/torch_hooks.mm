// Device guard, hooks, events and generator, for torch.mps and torch.accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/mps/MPSAllocatorInterface.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <unordered_map>

#include "torch_generator.h"

namespace softmetal {

void synchronize() {
  if (on_queue()) {
    violation("re-entrant dispatch_sync", "a PyTorch operator or torch.mps.synchronize() in a dispatch_sync block: it "
                                          "waits for the queue that runs the block");
  }
  for_each_stream([](at::mps::MPSStream& stream) { stream.synchronize(at::mps::SyncType::COMMIT_AND_WAIT); });
}

const at::Generator& default_generator() {
  static const auto* generator = new at::Generator(at::make_generator<MpsGenerator>(c10::default_rng_seed_val));
  return *generator;
}

namespace {

using at::mps::SyncType;
constexpr c10::DeviceType kMPS = c10::DeviceType::MPS;
// The macOS version that the device reports to PyTorch: the oldest on which this torch supports mps.
constexpr std::pair kMacOS = SOFTMETAL_TORCH_2(15) ? std::pair(15u, 0u) : std::pair(14u, 4u);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kMPS; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return getDevice();
  }
  c10::Device getDevice() const override { return {kMPS, 0}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_mps(), "Expected a MPS device, but got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getDefaultStream(c10::Device) const override { return at::mps::getDefaultMPSStream()->unwrap(); }
#if SOFTMETAL_TORCH_2(15)
  c10::Stream getStream(c10::Device) const override { return at::mps::getCurrentMPSStream()->unwrap(); }
  c10::Stream getNewStream(c10::Device, int) const override { return at::mps::getStreamFromPool()->unwrap(); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream({kMPS, 0});
    at::mps::setCurrentMPSStream(at::mps::getStreamByID(stream.id()));
    return previous;
  }
#else
  c10::Stream getStream(c10::Device device) const override { return getDefaultStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getDefaultStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getDefaultStream({kMPS, 0}); }
#endif
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override {
    synchronize();
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }

  // torch.Event uses the events of torch.mps. The pointer stores the event's number.
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(std::uintptr_t{hooks().acquireEvent(true)});
    hooks().recordEvent(number_of(*event));
  }
  void block(void* event, const c10::Stream&) const override { hooks().waitForEvent(number_of(event)); }
  bool queryEvent(void* event) const override { return event == nullptr || hooks().queryEvent(number_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) hooks().synchronizeEvent(number_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) hooks().releaseEvent(number_of(event));
  }
  double elapsedTime(void* first, void* last, c10::DeviceIndex) const override {
    return hooks().elapsedTimeOfEvents(number_of(first), number_of(last));
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits &= ~((1ULL << at::kIndex_Double) | (1ULL << at::kIndex_ComplexDouble));
    return capability;
  }

 private:
  static const at::MPSHooksInterface& hooks() { return at::detail::getMPSHooks(); }
  static uint32_t number_of(void* event) { return static_cast<uint32_t>(reinterpret_cast<std::uintptr_t>(event)); }
};

// An event. It completes when all work that was recorded before it has run.
struct Event {
  bool recorded = false, done = false;
  at::mps::MPSStream* stream = nullptr;  // on which it was recorded
  double time = 0;                       // seconds
};

class Events {
 public:
  uint32_t acquire() {
    events_[++last_] = std::make_shared<Event>();
    return last_;
  }
  void release(uint32_t number) { events_.erase(number); }
  std::shared_ptr<Event> get(uint32_t number) const {
    const auto found = events_.find(number);
    TORCH_CHECK(found != events_.end(), "mps event ", number, " does not exist");
    return found->second;
  }

 private:
  std::unordered_map<uint32_t, std::shared_ptr<Event>> events_;
  uint32_t last_ = 0;
};
Events& events() {
  static auto* instance = new Events();
  return *instance;
}

}  // namespace

// PyTorch finds the class by this name.
struct MPSHooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device == 0, "expected mps device 0, got ", static_cast<int>(device));
  }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    setCurrentDevice(device);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? 0 : exchangeDevice(device);
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override { return std::pair(major, minor) <= kMacOS; }
  c10::Device getDeviceFromPtr(void*) const override { return {kMPS, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<MpsGenerator>(c10::default_rng_seed_val);
  }
  c10::Allocator* getMPSDeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize() const override { synchronize(); }
  void commitStream() const override { at::mps::getCurrentMPSStream()->synchronize(SyncType::COMMIT); }
  void* getCommandBuffer() const override {
    auto* stream = at::mps::getCurrentMPSStream();
    stream->endKernelCoalescing();
    return stream->commandBuffer();
  }
  void* getDispatchQueue() const override { return at::mps::getCurrentMPSStream()->queue(); }
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes(); }
  size_t getRecommendedMaxMemory() const override { return at::mps::getIMPSAllocator()->getRecommendedMaxMemory(); }
  size_t getMaxBufferLength() const override { return [at::mps::MPSDevice::getInstance()->device() maxBufferLength]; }
  void setMemoryFraction(double ratio) const override { at::mps::getIMPSAllocator()->setHighWatermarkRatio(ratio); }
  void profilerStartTrace(const std::string& mode, bool wait) const override {
    at::mps::getMPSProfiler().StartTrace(mode, wait);
  }
  void profilerStopTrace() const override { at::mps::getMPSProfiler().StopTrace(); }
  uint32_t acquireEvent(bool) const override { return events().acquire(); }
  void releaseEvent(uint32_t number) const override { events().release(number); }
  void recordEvent(uint32_t number) const override {
    const std::shared_ptr<Event> event = events().get(number);
    event->recorded = true;
    event->done = false;
    auto* stream = at::mps::getCurrentMPSStream();
    event->stream = stream;
    {
      const auto lock = lock_queues();
      stream->endKernelCoalescing();
      stream->addCompletedHandler(^(id<MTLCommandBuffer> buffer) {
        event->done = true;
        event->time = [buffer GPUEndTime];
      });
    }
    stream->synchronize(SyncType::COMMIT);
  }
  // Work on one stream is ordered. If the event is on another stream, the work before the event runs at once.
  void waitForEvent(uint32_t number) const override {
    const std::shared_ptr<Event> event = events().get(number);
    const bool runs_first = event->stream == nullptr || event->stream == at::mps::getCurrentMPSStream();
    if (!runs_first) event->stream->synchronize(SyncType::COMMIT_AND_WAIT);
  }
  void synchronizeEvent(uint32_t number) const override {
    if (events().get(number)->recorded) synchronize();
  }
  bool queryEvent(uint32_t number) const override {
    const std::shared_ptr<Event> event = events().get(number);
    const bool done = event->done || !event->recorded;
    if (!done) synchronize();  // nothing runs in the background here, so the query must run the work
    return done;
  }
  double elapsedTimeOfEvents(uint32_t first, uint32_t last) const override {
    synchronize();
    const auto from = events().get(first), to = events().get(last);
    TORCH_CHECK(from->done && to->done, "elapsed_time: both events must have been recorded");
    return (to->time - from->time) * 1e3;
  }
};

namespace {

// Makes a torch that is built with CUDA, such as the one for Linux on PyPI, answer as if it were not. PyTorch refuses
// mps and CUDA in one process ("Cannot have both MPS and cuda", also from the backward pass on the CPU).
//
// The object that answers for CUDA exists before this library is loaded. This code replaces its virtual functions with
// those of its base class, which are the answers without CUDA. The object has no data members.
[[maybe_unused]] const bool answers_as_without_cuda = [] {
  static_assert(sizeof(at::CUDAHooksInterface) == sizeof(void*), "only the pointer to the virtual functions");
  static const at::CUDAHooksInterface without_cuda;
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(hooks), static_cast<const void*>(&without_cuda), sizeof(without_cuda));
  return true;
}();

}  // namespace

}  // namespace softmetal

namespace at {
using softmetal::Guard;
using softmetal::MPSHooks;
REGISTER_MPS_HOOKS(MPSHooks)
}  // namespace at
namespace softmetal {
C10_REGISTER_GUARD_IMPL(MPS, Guard)
}
