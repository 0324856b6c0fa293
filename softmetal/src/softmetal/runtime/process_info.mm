// NSProcessInfo: the version of macOS.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <Metal/Metal.h>

@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
  static NSProcessInfo* instance = [[NSProcessInfo alloc] init];
  return instance;
}
// Returns macOS 26.2, the first version for which MLX builds kernels for tensor units. The environment variable
// SOFTMETAL_MACOS selects another version.
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
