// The mps allocator. A storage's data pointer is an MTLBuffer object, as on a Mac.
#include <ATen/mps/MPSAllocatorInterface.h>
#include <ATen/mps/MPSDevice.h>

#include <cstring>

#include "torch_device.h"

namespace softmetal {
namespace {

const c10::Device kDevice(c10::DeviceType::MPS, 0);

void release_buffer(void* handle) {
  if (handle != nullptr) [static_cast<id>(handle) release];
}

class Allocator final : public at::mps::IMPSAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release_buffer, kDevice};
    const auto limit = static_cast<size_t>(high_ratio_ * static_cast<double>(getRecommendedMaxMemory()));
    if (high_ratio_ > 0 && allocated_bytes() + bytes > limit) {
      C10_THROW_ERROR(OutOfMemoryError, "MPS backend out of memory (allocated: " + formatSize(allocated_bytes()) +
                                            ", max allowed: " + formatSize(limit) + "). Tried to allocate " +
                                            formatSize(bytes) + ".");
    }
    if (next_fails()) C10_THROW_ERROR(OutOfMemoryError, "MPS backend out of memory (a test asked for it).");
    id<MTLBuffer> buffer = [device() newBufferWithLength:bytes options:MTLResourceStorageModeShared];
    if (buffer == nil) {
      C10_THROW_ERROR(OutOfMemoryError, "Invalid buffer size: " + formatSize(bytes));
    }
    ++allocations_;
    peak_ = std::max(peak_.load(), allocated_bytes());
    return {buffer, buffer, &release_buffer, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_buffer; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    if (count == 0) return;
    synchronize();
    Memory &to = memory(destination), &from = memory(source);
    std::memcpy(to.bytes(), from.bytes(), count);
    to.mark_written(0, count);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto aggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[aggregate].current = static_cast<int64_t>(allocated_bytes());
      (*bytes)[aggregate].peak = static_cast<int64_t>(peak_);
    }
    stats.num_device_alloc = allocations_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { allocations_ = 0; }
  void resetPeakStats(c10::DeviceIndex) override { peak_ = allocated_bytes(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t total = getRecommendedMaxMemory();
    return {total - std::min(total, allocated_bytes()), total};
  }

  void freeInactiveBuffers() const override {}
  ssize_t getUnalignedBufferSize(const void* handle) const override {
    return handle == nullptr ? -1 : static_cast<ssize_t>(memory(handle).length());
  }
  c10::IntArrayRef getBufferShape(const void*) const override { return {}; }
  id_t getBufferId(const void* handle) const override {
    return static_cast<id_t>(reinterpret_cast<uintptr_t>(handle) >> 4);
  }
  void setBufferShape(const void*, const c10::IntArrayRef&) const override {}
  bool isSharedBuffer(const void* handle) const override { return handle != nullptr; }
  c10::DataPtr allocScalarBufferWithValue(void* value, size_t size) const override {
    c10::DataPtr pointer = allocator().allocate(size);
    std::memcpy(memory(pointer.get()).bytes(), value, size);
    memory(pointer.get()).mark_all_written();
    return pointer;
  }
  std::string formatSize(size_t size) const override {
    std::array<char, 32> text;
    std::snprintf(text.data(), text.size(), "%.2f MiB", static_cast<double>(size) / (1 << 20));
    return text.data();
  }
  void setLowWatermarkRatio(double) const override {}
  void setHighWatermarkRatio(double ratio) const override { high_ratio_ = ratio; }
  ssize_t getLowWatermarkValue() const override { return static_cast<ssize_t>(getLowWatermarkLimit()); }
  size_t getLowWatermarkLimit() const override { return getRecommendedMaxMemory(); }
  size_t getHighWatermarkLimit() const override {
    return static_cast<size_t>(high_ratio_ * static_cast<double>(getRecommendedMaxMemory()));
  }
  size_t getTotalAllocatedMemory() const override { return allocated_bytes(); }
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes(); }
  size_t getRecommendedMaxMemory() const override { return [device() recommendedMaxWorkingSetSize]; }
  std::pair<const void*, uint32_t> getSharedBufferPtr(const void* handle) const override {
    return {memory(handle).bytes(), 0};
  }
  c10::Storage getHostAliasStorage(const c10::Storage& storage) const override {
    TORCH_CHECK(storage.device_type() == c10::DeviceType::MPS && storage.data() != nullptr,
                "_host_alias_storage: expected a non-empty storage on mps, got one on ", storage.device());
    memory(storage.data()).mark_all_written();  // the device cannot observe the host's writes through the alias
    auto* owner = new c10::Storage(storage);
    c10::DataPtr pointer(
        memory(storage.data()).bytes(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); },
        c10::Device(c10::DeviceType::CPU));
    return {c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(pointer), nullptr, false};
  }
  bool recordEvents(c10::ArrayRef<const void*>) const override { return true; }
  bool waitForEvents(c10::ArrayRef<const void*>) const override { return true; }

 private:
  // Counts down to the allocation that must fail. Returns true for that allocation.
  static bool next_fails() {
    std::atomic<int64_t>& left = Device::get().allocations_left;
    for (int64_t now = left; now >= 0;) {
      if (left.compare_exchange_weak(now, now - 1)) return now == 0;
    }
    return false;
  }
  static id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }
  static Memory& memory(const void* handle) {
    return *static_cast<SoftMetalBuffer*>(static_cast<id>(const_cast<void*>(handle)))->memory;
  }

  mutable double high_ratio_ = 1.7;  // PyTorch's default high watermark
  std::atomic<size_t> peak_{0};
  std::atomic<int64_t> allocations_{0};
};

Allocator& instance() {
  static auto* allocator = new Allocator();
  return *allocator;
}

}  // namespace

c10::Allocator& allocator() {
  return instance();
}

SoftMetalBuffer* buffer_of(const at::Tensor& tensor) {
  return static_cast<SoftMetalBuffer*>(static_cast<id>(const_cast<void*>(tensor.storage().data())));
}

static const c10::AllocatorRegisterer<c10::DeviceType::MPS> registered(&instance());

}  // namespace softmetal

namespace at::mps {
IMPSAllocator* getIMPSAllocator() {
  return &softmetal::instance();
}
at::Allocator* GetMPSAllocator() {
  return &softmetal::instance();
}
bool isMPSPinnedPtr(const void*) {
  return false;
}
}  // namespace at::mps
