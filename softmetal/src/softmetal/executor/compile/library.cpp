#include "compile/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "executor.h"

namespace softmetal {
namespace {

std::mutex mutex;
std::map<std::string, std::unique_ptr<sm_library>> libraries;

// Makes the sm_* functions visible to compiled libraries, even if this library was loaded without RTLD_GLOBAL.
void become_global() {
  static bool done = false;
  Dl_info info;
  if (done || dladdr(reinterpret_cast<void*>(&become_global), &info) == 0) return;
  dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
  done = true;
}

int find_range(dl_phdr_info* info, size_t, void* data) {
  auto* library = static_cast<sm_library*>(data);
  if (reinterpret_cast<const char*>(info->dlpi_addr) != library->base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const char* start = library->base + info->dlpi_phdr[i].p_vaddr;
    library->low = std::min(library->low, start);
    library->high = std::max(library->high, start + info->dlpi_phdr[i].p_memsz);
  }
  return 1;
}

// Finds the kernel of each threadgroup variable. All code is inlined into the kernels' entries. A variable therefore
// belongs to the last entry at or below the address of the code that declares it.
void place_sites(sm_library& library) {
  library.sites.resize(library.kernels.size());
  for (const sm_threadgroup_site* site = library.table->sites_begin; site != library.table->sites_end; ++site) {
    size_t owner = 0;
    const void* best = nullptr;
    for (size_t k = 0; k < library.kernels.size(); ++k) {
      const void* entry = reinterpret_cast<const void*>(library.kernels[k].entry);
      if (entry != nullptr && entry <= site->code && entry > best) {
        best = entry;
        owner = k;
      }
    }
    auto& sites = library.sites[owner];
    bool known = std::any_of(sites.begin(), sites.end(), [&](const auto& s) { return s.site == site->site; });
    if (!known) sites.push_back(*site);
  }
  for (size_t k = 0; k < library.kernels.size(); ++k) {
    uint32_t bytes = 0;
    for (const sm_threadgroup_site& site : library.sites[k]) {
      uint32_t align = std::max(site.align, 16u);
      bytes = (bytes + align - 1) / align * align + site.bytes;
    }
    library.kernels[k].static_threadgroup_bytes = bytes;
  }
}

}  // namespace

SourceLine source_line(const sm_library& library, const void* return_address) {
  static std::mutex lines_mutex;
  static std::map<const void*, SourceLine> lines;
  std::lock_guard<std::mutex> lock(lines_mutex);
  auto [entry, is_new] = lines.try_emplace(return_address);
  const char* code = static_cast<const char*>(return_address) - 1;
  if (!is_new || code < library.low || code >= library.high) return entry->second;
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", library.path.c_str(),
                static_cast<size_t>(code - library.base));
  FILE* pipe = popen(command, "r");
  char text[4096];
  while (pipe != nullptr && std::fgets(text, sizeof text, pipe) != nullptr) {
    char* colon = std::strrchr(text, ':');
    if (colon == nullptr || std::strstr(text, "/msl/include/") || std::strstr(text, "/msl/tensor/") ||
        std::strstr(text, "/msl/thunk.h"))
      continue;
    uint32_t number = static_cast<uint32_t>(std::strtoul(colon + 1, nullptr, 10));
    *colon = 0;
    if (number == 0 || entry->second.line != 0) continue;
    const char* file = text;
    while (std::strncmp(file, "./", 2) == 0)
      file += 2;
    entry->second = {file, number};
  }
  if (pipe != nullptr) pclose(pipe);
  return entry->second;
}

}  // namespace softmetal

extern "C" {

const sm_library* sm_library_open(const char* path, char** error) {
  using namespace softmetal;
  std::lock_guard<std::mutex> lock(mutex);
  auto known = libraries.find(path);
  if (known != libraries.end()) return known->second.get();
  become_global();
  sm_self = nullptr;
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const void* table = handle != nullptr ? dlsym(handle, "sm_table") : nullptr;
  if (table == nullptr) {
    if (error != nullptr) *error = strdup(dlerror());
    return nullptr;
  }
  auto library = std::make_unique<sm_library>();
  library->path = path;
  library->table = static_cast<const sm_library_table*>(table);
  library->kernels.assign(library->table->kernels, library->table->kernels + library->table->kernel_count);
  Dl_info info;
  dladdr(table, &info);
  library->base = library->low = library->high = static_cast<const char*>(info.dli_fbase);
  dl_iterate_phdr(find_range, library.get());
  place_sites(*library);
  return libraries.emplace(path, std::move(library)).first->second.get();
}

uint32_t sm_library_is_checked(const sm_library* library) {
  return library->table->is_checked;
}
uint32_t sm_library_kernel_count(const sm_library* library) {
  return static_cast<uint32_t>(library->kernels.size());
}
const sm_kernel* sm_library_kernel(const sm_library* library, uint32_t i) {
  return &library->kernels[i];
}

const sm_kernel* sm_library_find(const sm_library* library, const char* host_name) {
  for (const sm_kernel& kernel : library->kernels) {
    if (std::strcmp(kernel.name, host_name) == 0) return &kernel;
  }
  return nullptr;
}

uint32_t sm_library_constant_count(const sm_library* library) {
  return library->table->constant_count;
}
const sm_function_constant* sm_library_constant(const sm_library* library, uint32_t i) {
  return &library->table->constants[i];
}

void sm_free_text(char* text) {
  free(text);
}

}  // extern "C"
