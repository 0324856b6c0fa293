// Working memory that a thread reuses in later calls. An allocation in each call would cause page faults, which are too
// slow for calls of about 100 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace marlin::cpu {

// The largest number of bytes of a Scratch that a thread retains after a call.
inline constexpr size_t kKeepBytes = size_t{8} << 20;

class Scratch {
 public:
  // Returns uninitialized memory for at least `count` elements, aligned to 64 bytes. The memory is valid until the next
  // call of get() or trim().
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      trim(0);  // resets size_, in case the allocation throws
      data_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

  // Frees the memory if it is larger than `bytes`.
  void trim(size_t bytes) {
    if (size_ > bytes) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace marlin::cpu
