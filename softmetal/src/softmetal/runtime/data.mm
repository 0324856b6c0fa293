// NSURL for files, NSProcessInfo, and dispatch_data.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <Metal/Metal.h>

@implementation NSURL
+ (NSURL*)fileURLWithPath:(NSString*)path {
  NSURL* url = [[[self alloc] init] autorelease];
  url->_state = [path retain];
  return url;
}
- (void)dealloc {
  [static_cast<NSString*>(_state) release];
  [super dealloc];
}
- (NSString*)path {
  return static_cast<NSString*>(_state);
}
@end

@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
  static NSProcessInfo* instance = [[NSProcessInfo alloc] init];
  return instance;
}
// Returns macOS 26.2, the first version for which MLX builds kernels for tensor units. The environment variable
// SOFTMETAL_MACOS names another version.
- (NSOperatingSystemVersion)operatingSystemVersion {
  const char* set = std::getenv("SOFTMETAL_MACOS");
  if (set == nullptr || *set == 0) return {26, 2, 0};
  int major = 0, minor = 0, end = 0;
  if (std::sscanf(set, "%d.%d%n", &major, &minor, &end) != 2 || set[end] != 0) {
    throw std::invalid_argument(std::string("SOFTMETAL_MACOS: expected a version such as 26.2, got ") + set);
  }
  return {major, minor, 0};
}
@end

@interface SoftMetalData : NSObject <OS_dispatch_data> {
 @public
  std::vector<uint8_t>* bytes;
}
@end

@implementation SoftMetalData
- (void)dealloc {
  delete bytes;
  [super dealloc];
}
@end

extern "C" __attribute__((visibility("default"))) dispatch_data_t dispatch_data_create(const void* buffer, size_t size,
                                                                                       dispatch_queue_t,
                                                                                       dispatch_block_t destructor) {
  SoftMetalData* data = [[SoftMetalData alloc] init];
  const auto* first = static_cast<const uint8_t*>(buffer);
  data->bytes = new std::vector<uint8_t>(first, first + size);
  if (destructor != nullptr) destructor();
  return data;
}

extern "C" __attribute__((visibility("default"))) dispatch_data_t dispatch_data_create_map(dispatch_data_t data,
                                                                                           const void** buffer_ptr,
                                                                                           size_t* size_ptr) {
  auto* whole = static_cast<SoftMetalData*>(data);
  if (buffer_ptr != nullptr) *buffer_ptr = whole->bytes->data();
  if (size_ptr != nullptr) *size_ptr = whole->bytes->size();
  return [whole retain];
}
