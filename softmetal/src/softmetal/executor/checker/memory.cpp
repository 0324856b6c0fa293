// The memory of a kernel in checked mode. Lays out address ranges, copies the buffers in and out, and finds the region
// of an address.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "checker/checker.h"
#include "compile/library.h"
#include "report.h"

namespace softmetal {
namespace {

// The checker reserves address space once: 2^38 bytes for each buffer and 2^33 bytes for each threadgroup array. The
// memory is in the middle of its range, so an address out of bounds still falls into the right range.
constexpr uint32_t kDeviceShift = 38, kThreadgroupShift = 33;
constexpr uint32_t kVariables = 64;  // declarations in one source file
constexpr uint32_t kArraysPerGroup = SM_BUFFER_SLOTS + kVariables;
constexpr uintptr_t kPage = 4096;
constexpr int kUnwritten = 0xFF;

uintptr_t reserve(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no address space for checked mode\n");
    std::abort();
  }
  return reinterpret_cast<uintptr_t>(memory);
}

constexpr uint64_t kDeviceBytes = static_cast<uint64_t>(SM_BUFFER_SLOTS) << kDeviceShift;
constexpr uint64_t kThreadgroupBytes = static_cast<uint64_t>(kMaxConcurrentGroups * kArraysPerGroup)
                                       << kThreadgroupShift;
uintptr_t device_base = 0, threadgroup_base = 0;  // reserved by the first checker

uintptr_t middle(uintptr_t base, uint32_t shift, uint32_t place) {
  return base + (static_cast<uintptr_t>(place) << shift) + (static_cast<uintptr_t>(1) << (shift - 1));
}

// Makes the pages around [start, start + bytes) usable, or returns them to the system.
void set_usable(const char* start, uint64_t bytes, bool usable) {
  uintptr_t low = reinterpret_cast<uintptr_t>(start) & ~(kPage - 1);
  uintptr_t high = (reinterpret_cast<uintptr_t>(start) + bytes + kPage) & ~(kPage - 1);
  int protection = usable ? PROT_READ | PROT_WRITE : PROT_NONE;
  void* done = mmap(reinterpret_cast<void*>(low), high - low, protection,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (done == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no memory for checked mode\n");
    std::abort();
  }
}

Checker* active_checker = nullptr;

}  // namespace

Checker* Checker::active() {
  return active_checker;
}

Checker::Checker(Launch& launch, Machine& machine, uint32_t concurrent)
    : launch_(launch),
      machine_(machine),
      device_(SM_BUFFER_SLOTS),
      threadgroup_(kMaxConcurrentGroups * kArraysPerGroup) {
  if (device_base == 0) {
    device_base = reserve(kDeviceBytes);
    threadgroup_base = reserve(kThreadgroupBytes);
  }
  bind_buffers();
  bind_threadgroup_memory(concurrent);
  const sm_library& library = *launch.dispatch->library;
  executor_memory_.push_back({reinterpret_cast<uintptr_t>(&launch), sizeof launch});
  executor_memory_.push_back({reinterpret_cast<uintptr_t>(&sm_self), sizeof sm_self});
  executor_memory_.push_back(
      {reinterpret_cast<uintptr_t>(library.low), static_cast<uintptr_t>(library.high - library.low)});
  for (uint32_t i = 0; i < concurrent; ++i) {
    const Group& group = machine.group(i);
    executor_memory_.push_back({reinterpret_cast<uintptr_t>(&group), sizeof group});
    executor_memory_.push_back({reinterpret_cast<uintptr_t>(group.lanes.get()), sizeof(Lane) * SM_MAX_THREADS});
    executor_memory_.push_back(
        {reinterpret_cast<uintptr_t>(group.simdgroups.get()), sizeof(Simdgroup) * kMaxSimdgroups});
  }
  active_checker = this;
}

Checker::~Checker() {
  active_checker = nullptr;
  for (const auto& region : device_) {
    if (region && region->start != region->host) set_usable(region->start, region->bytes, false);
  }
  for (const auto& region : threadgroup_) {
    if (region) set_usable(region->start, region->bytes, false);
  }
}

bool Checker::is_argument_const(uint32_t slot, bool* is_used) const {
  bool is_const = true;
  *is_used = false;
  for (uint32_t i = 0; i < launch_.kernel->argument_count; ++i) {
    const sm_argument& argument = launch_.kernel->arguments[i];
    if (argument.kind != SM_ARGUMENT_BUFFER || argument.index != slot) continue;
    *is_used = true;
    is_const = is_const && argument.is_const != 0;
  }
  return is_const || launch_.dispatch->buffers[slot].read_only != 0;
}

void Checker::bind_buffers() {
  struct Bound {
    int32_t slot;  // or -1 for a resident buffer
    char *low, *high;
    bool is_const;
    uint8_t* initialised;  // from `low`
  };
  std::vector<Bound> bound;
  auto add = [&](int32_t slot, const sm_buffer& buffer, uint64_t offset, bool is_const) {
    char* base = static_cast<char*>(buffer.base);
    uint8_t* initialised = buffer.initialised != nullptr ? buffer.initialised + offset : nullptr;
    bound.push_back({slot, base + offset, base + buffer.length, is_const, initialised});
  };
  for (uint32_t i = 0; i < SM_BUFFER_SLOTS; ++i) {
    const sm_buffer& buffer = launch_.dispatch->buffers[i];
    bool is_used;
    bool is_const = is_argument_const(i, &is_used);
    launch_.buffers[i] = nullptr;
    if (buffer.base == nullptr || !is_used) continue;
    add(static_cast<int32_t>(i), buffer, std::min(buffer.offset, buffer.length), is_const);
  }
  for (uint32_t i = 0; i < launch_.dispatch->resident_count; ++i) {
    const sm_buffer& buffer = launch_.dispatch->resident[i];
    add(-1, buffer, 0, buffer.read_only != 0);
  }
  std::sort(bound.begin(), bound.end(), [](const Bound& a, const Bound& b) { return a.low < b.low; });
  for (size_t i = 0; i < bound.size();) {
    char* high = bound[i].high;
    bool is_const = bound[i].is_const, is_resident = bound[i].slot < 0;
    int32_t place = bound[i].slot;
    size_t end = i + 1;  // buffers whose memory overlaps share one region
    for (; end < bound.size() && bound[end].low < high; ++end) {
      high = std::max(high, bound[end].high);
      is_const = is_const && bound[end].is_const;
      is_resident = is_resident || bound[end].slot < 0;
      place = std::max(place, bound[end].slot);
    }
    uint64_t bytes = static_cast<uint64_t>(high - bound[i].low);
    // Two kinds of buffers are not copied: the kernel already has the address of a resident buffer, and a sparse buffer
    // is too large.
    const bool is_in_place = is_resident || bytes >= kSparseBytes;
    char* start = bound[i].low;
    if (!is_in_place) {
      // The low bits of the copy's address equal those of the original, so that both have the same alignment.
      start = reinterpret_cast<char*>(middle(device_base, kDeviceShift, static_cast<uint32_t>(place))) +
              (reinterpret_cast<uintptr_t>(bound[i].low) & (kPage - 1));
      set_usable(start, bytes, true);
      std::memcpy(start, bound[i].low, bytes);
    }
    auto region = std::make_unique<Region>(start, bytes, false, !is_const);
    region->is_const = is_const;
    region->host = bound[i].low;
    for (size_t j = i; j < end && region->host_initialised == nullptr; ++j) {
      if (bound[j].initialised != nullptr)
        region->host_initialised = bound[j].initialised - (bound[j].low - region->host);
    }
    if (!region->is_sparse()) {
      std::memset(region->flag(0), kWritten, bytes);
      for (uint64_t b = 0; region->host_initialised != nullptr && b < bytes; ++b)
        *region->flag(b) = region->host_initialised[b] != 0 ? kWritten : 0;
    }
    for (; i < end; ++i) {
      if (bound[i].slot < 0) continue;
      uint64_t offset = static_cast<uint64_t>(bound[i].low - region->host);
      region->bindings.push_back({bound[i].slot, offset});
      launch_.buffers[bound[i].slot] = start + offset;
    }
    if (is_in_place) in_place_.push_back(region.get());
    if (place >= 0) {
      device_[static_cast<size_t>(place)] = std::move(region);
    } else {
      resident_.push_back(std::move(region));
    }
  }
}

void Checker::bind_threadgroup_memory(uint32_t concurrent) {
  for (uint32_t g = 0; g < concurrent; ++g) {
    auto add = [&](uint32_t array, uint64_t bytes) {
      uint32_t place = g * kArraysPerGroup + array;
      char* start = reinterpret_cast<char*>(middle(threadgroup_base, kThreadgroupShift, place));
      set_usable(start, bytes, true);
      threadgroup_[place] = std::make_unique<Region>(start, bytes, true, true);
      return threadgroup_[place].get();
    };
    for (uint32_t i = 0; i < launch_.kernel->argument_count; ++i) {
      const sm_argument& argument = launch_.kernel->arguments[i];
      if (argument.kind != SM_ARGUMENT_THREADGROUP) continue;
      add(argument.index, launch_.dispatch->threadgroup_bytes[argument.index])->argument =
          static_cast<int32_t>(argument.index);
    }
    for (const sm_threadgroup_site& site : *launch_.sites) {
      add(SM_BUFFER_SLOTS + site.site % kVariables, site.bytes)->variable = site.site;
    }
  }
}

void Checker::place_threadgroup_memory(Group& group, uint32_t slot) {
  settle();
  for (uint32_t array = 0; array < kArraysPerGroup; ++array) {
    Region* region = threadgroup_[slot * kArraysPerGroup + array].get();
    if (region != nullptr) {
      region->forget();
      std::memset(region->start, kUnwritten, region->bytes);
    }
    if (array < SM_BUFFER_SLOTS) group.threadgroup_arguments[array] = region != nullptr ? region->start : nullptr;
  }
  group.variables.clear();
  for (const sm_threadgroup_site& site : *launch_.sites) {
    if (site.site >= group.variables.size()) group.variables.resize(site.site + 1);
    group.variables[site.site] = threadgroup_[slot * kArraysPerGroup + SM_BUFFER_SLOTS + site.site % kVariables]->start;
  }
}

Region* Checker::find(uintptr_t address) const {
  if (address - device_base < kDeviceBytes) return device_[(address - device_base) >> kDeviceShift].get();
  if (address - threadgroup_base < kThreadgroupBytes) {
    return threadgroup_[(address - threadgroup_base) >> kThreadgroupShift].get();
  }
  for (Region* region : in_place_) {
    if (address - reinterpret_cast<uintptr_t>(region->start) < region->bytes) return region;
  }
  return nullptr;
}

void Checker::write_back() {
  settle();
  for (const auto* regions : {&device_, &resident_}) {
    for (const auto& region : *regions) {
      if (!region || !region->is_written) continue;
      if (region->start != region->host) std::memcpy(region->host, region->start, region->bytes);
      if (region->host_initialised == nullptr) continue;
      region->for_each_touched([&](uint64_t first, uint64_t end) {
        for (uint64_t b = first; b < end; ++b) {
          if (*region->flag(b) & kWritten) region->host_initialised[b] = 1;
        }
      });
    }
  }
}

}  // namespace softmetal
