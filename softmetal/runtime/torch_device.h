// Declarations that the parts of the torch device share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <mutex>

#include "metal.h"

namespace softmetal {

inline constexpr unsigned kCoreCount = 8;  // GPU cores of an M1

// Locks the stream. Called inside a dispatch_sync block it is a violation.
std::unique_lock<std::recursive_mutex> lock_stream(const char* what);
// Commits, runs all work and raises the faults that checked mode found.
void synchronize();
// Throws one error with the faults found since the last call, if any.
void raise_new_faults();

c10::Allocator& allocator();
// Returns the object behind an mps tensor's storage; nil if it is empty.
SoftMetalBuffer* buffer_of(const at::Tensor& tensor);

}  // namespace softmetal
