#include "csrc/mps/library.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "csrc/mps/kernel_sources.h"
#include "csrc/mps/stream.h"

namespace marlin::mps {

namespace {

struct Cache {
  std::mutex mutex;
  std::map<std::string_view, id<MTLLibrary>> libraries;
  std::map<std::tuple<std::string, FunctionConstants>, id<MTLComputePipelineState>> pipelines;
};

Cache& cache() {
  static auto* instance = new Cache;
  return *instance;
}

std::string message(NSError* error) {
  return error == nil ? "no reason given" : [[error localizedDescription] UTF8String];
}

MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  [options setLanguageVersion:MTLLanguageVersion3_1];
  // The FP4 and INT4 decode relies on subnormals and NaN, and the mLSTM on precise exp and log. macOS 15 has a property
  // for each of the two; on macOS 14 fastMathEnabled controls both.
#if !defined(__MAC_OS_X_VERSION_MAX_ALLOWED) || __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  if ([options respondsToSelector:@selector(setMathMode:)] &&
      [options respondsToSelector:@selector(setMathFloatingPointFunctions:)]) {
    [options setMathMode:MTLMathModeSafe];
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    return options;
  }
#endif
  [options setFastMathEnabled:NO];
  return options;
}

const char* source_text(std::string_view library) {
  const auto sources = kernel_sources();
  const auto found = std::find_if(sources.begin(), sources.end(),
                                  [&](const KernelSource& source) { return source.library == library; });
  TORCH_CHECK(found != sources.end(), "torch_marlin_metal: this build holds no kernel source ", library, ".metal");
  return found->text;
}

id<MTLLibrary> library(std::string_view name) {
  id<MTLLibrary>& entry = cache().libraries[name];
  if (entry != nil) return entry;
  NSError* error = nil;
  NSString* source = [NSString stringWithUTF8String:source_text(name)];
  entry = [device() newLibraryWithSource:source options:compile_options() error:&error];
  TORCH_CHECK(entry != nil, "torch_marlin_metal: ", name, ".metal does not compile: ", message(error));
  return entry;
}

// kMetal_<type> is the Metal type of each type in MARLIN_FUNCTION_CONSTANTS.
constexpr MTLDataType kMetal_bool = MTLDataTypeBool;
constexpr MTLDataType kMetal_int = MTLDataTypeInt;

id<MTLFunction> new_function(const Dispatch& dispatch) {
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
#define MARLIN_SET_CONSTANT(index, metal_type, shader_name, name)            \
  {                                                                          \
    const auto value = static_cast<metal_type>(dispatch.constants[index]);   \
    [values setConstantValue:&value type:kMetal_##metal_type atIndex:index]; \
  }
  MARLIN_FUNCTION_CONSTANTS(MARLIN_SET_CONSTANT)
#undef MARLIN_SET_CONSTANT
  NSError* error = nil;
  id<MTLFunction> function = [library(info(dispatch.kernel).library)
      newFunctionWithName:[NSString stringWithUTF8String:dispatch.function.c_str()]
           constantValues:values
                    error:&error];
  TORCH_CHECK(function != nil, "torch_marlin_metal: kernel ", dispatch.function, " (", info(dispatch.kernel).library,
              ".metal) is not available: ", message(error));
  return function;
}

id<MTLComputePipelineState> new_pipeline(const Dispatch& dispatch) {
  id<MTLFunction> function = new_function(dispatch);
  NSError* error = nil;
  id<MTLComputePipelineState> pipeline = [device() newComputePipelineStateWithFunction:function error:&error];
  [function release];
  TORCH_CHECK(pipeline != nil, "torch_marlin_metal: kernel ", dispatch.function, " (", info(dispatch.kernel).library,
              ".metal) does not compile: ", message(error));
  return pipeline;
}

id<MTLComputePipelineState> pipeline_for(const Dispatch& dispatch) {
  const std::lock_guard lock(cache().mutex);
  id<MTLComputePipelineState>& entry = cache().pipelines[{dispatch.function, dispatch.constants}];
  if (entry == nil) entry = new_pipeline(dispatch);
  const NSUInteger threads = NSUInteger{dispatch.threads.x} * dispatch.threads.y * dispatch.threads.z;
  TORCH_CHECK(threads <= [entry maxTotalThreadsPerThreadgroup], "torch_marlin_metal: kernel ", dispatch.function,
              " needs ", threads, " threads per threadgroup, but this GPU can run at most ",
              static_cast<uint64_t>([entry maxTotalThreadsPerThreadgroup]));
  return entry;
}

}  // namespace

CompiledPlan compile(Plan plan) {
  @autoreleasepool {
    print_plan_once(plan);
    CompiledPlan compiled{std::move(plan), {}};
    for (const Dispatch& dispatch : compiled.plan.dispatches)
      compiled.pipelines.push_back(pipeline_for(dispatch));
    return compiled;
  }
}

}  // namespace marlin::mps
