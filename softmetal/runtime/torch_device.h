// What the parts of the torch device share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <mutex>

#include "metal.h"

namespace softmetal {

inline constexpr unsigned kCoreCount = 8;  // GPU cores of an M1

// Takes the stream from outside its queue; a violation from inside a block.
std::unique_lock<std::recursive_mutex> lock_stream(const char* what);
// Commits, runs everything and raises what checked mode found.
void synchronize();
// Raises the faults found since the last call, as one error.
void raise_new_faults();

c10::Allocator& allocator();
// The object behind an mps tensor's storage; nil for an empty one.
SoftMetalBuffer* buffer_of(const at::Tensor& tensor);

}  // namespace softmetal
