#include "csrc/mps/library.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "csrc/mps/compile_once.h"
#include "csrc/mps/kernel_sources.h"
#include "csrc/mps/pytorch_internals.h"
#include "csrc/planner/commit_policy.h"

namespace marlin::mps {

namespace {

// The result of a compilation: a Metal object, which lives until the process ends, or an error.
template <typename Object>
struct Compiled {
  Object object = nil;
  std::string error;
  bool is_final = true;  // false for a failure if a later attempt may succeed
};
using Library = Compiled<id<MTLLibrary>>;
using Pipeline = Compiled<id<MTLComputePipelineState>>;

struct Cache {
  CompileOnce<std::string, Library> libraries;
  CompileOnce<std::pair<KernelInstance, FunctionConstants>, Pipeline> pipelines;
};

// Returns the cache. The first call asks Metal to run as many compilations at a time as it can, because by default
// Metal runs few, and threads would wait for each other.
Cache& cache() {
  static auto* instance = [] {
    id<MTLDevice> gpu = device();
    if ([gpu respondsToSelector:@selector(setShouldMaximizeConcurrentCompilation:)]) {
      [gpu setShouldMaximizeConcurrentCompilation:YES];
    }
    return new Cache;
  }();
  return *instance;
}

std::string message(NSError* error) {
  return error == nil ? "no reason given" : [[error localizedDescription] UTF8String];
}

// Metal's compiler is a separate process. The system may end that process when memory is short, and a sandbox may block
// it. Metal starts the process again at the next request, so an interrupted compilation is worth a second attempt. The
// error of an interrupted compilation contains "XPC_ERROR_CONNECTION" or "internal error" (ggml-org/llama.cpp issue
// 12232, flutter/flutter issue 68649). A crash of the compiler also gives "internal error".
bool is_interruption(const std::string& error) {
  return error.find("XPC_ERROR_CONNECTION") != std::string::npos;
}
bool may_succeed_again(const std::string& error) {
  return is_interruption(error) || error.find("internal error") != std::string::npos;
}

// Calls compile(NSError**), and calls it a second time if the error may be temporary. The autorelease pool inside the
// loop releases the attempts' temporary Objective-C objects, because the caller may throw.
template <typename Object, typename Compile>
Compiled<Object> compiled(const Compile& compile) {
  constexpr int kAttempts = 2;
  std::string error;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    @autoreleasepool {
      NSError* failure = nil;
      if (Object object = compile(&failure); object != nil) return {object, {}, true};
      error = message(failure);
    }
    if (!may_succeed_again(error)) break;
  }
  return {nil, error, !is_interruption(error)};
}

// SDKs before macOS 26 do not define MTLLanguageVersion4_0. Its number follows the scheme of the older versions.
constexpr auto kLanguageOfTensors =
    static_cast<MTLLanguageVersion>((kTensorSystem.language.major << 16) + kTensorSystem.language.minor);

MTLCompileOptions* compile_options(Kernel kernel) {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  [options setLanguageVersion:needs_tensor_units(kernel) ? kLanguageOfTensors : MTLLanguageVersion3_1];
  // mathMode is Safe, because the decode needs subnormals and NaN, and because the compiler must not reorder the
  // subtraction of zero points. mathFloatingPointFunctions is Precise, because the mLSTM needs precise exp and log.
  // macOS 14 has only fastMathEnabled, which controls both.
#if !defined(__MAC_OS_X_VERSION_MAX_ALLOWED) || __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  // clang warns that these methods need macOS 15: it does not see that respondsToSelector: guards them.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunguarded-availability-new"
  if ([options respondsToSelector:@selector(setMathMode:)] &&
      [options respondsToSelector:@selector(setMathFloatingPointFunctions:)]) {
    [options setMathMode:MTLMathModeSafe];
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    return options;
  }
#pragma clang diagnostic pop
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

// Returns the Metal source for one function: two macros that select the function (kernel_list.h), then the whole file.
std::string library_text(const KernelInstance& instance) {
  const char* file = source_text(info(instance.kernel).library);
  const std::string only = template_instance(instance);
  if (only.empty()) return file;
  return "#define MARLIN_ONLY " + only + "\n#define MARLIN_ONLY_NAME \"" + host_name(instance) + "\"\n" + file;
}

Library library(const KernelInstance& instance) {
  const KernelInfo& kernel = info(instance.kernel);
  const bool is_whole_file = kernel.naming == KernelNaming::plain;
  return cache().libraries.get(is_whole_file ? std::string(kernel.library) : host_name(instance), [&] {
    const std::string text = library_text(instance);
    return compiled<id<MTLLibrary>>([&](NSError** error) {
      NSString* source = [NSString stringWithUTF8String:text.c_str()];
      return [device() newLibraryWithSource:source options:compile_options(instance.kernel) error:error];
    });
  });
}

// kMetal_<type> is the MTLDataType of a type in MARLIN_FUNCTION_CONSTANTS.
constexpr MTLDataType kMetal_bool = MTLDataTypeBool;
constexpr MTLDataType kMetal_int = MTLDataTypeInt;

MTLFunctionConstantValues* constant_values(const FunctionConstants& constants) {
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
#define MARLIN_SET_CONSTANT(index, metal_type, shader_name, name)            \
  {                                                                          \
    const auto value = static_cast<metal_type>(constants[index]);            \
    [values setConstantValue:&value type:kMetal_##metal_type atIndex:index]; \
  }
  MARLIN_FUNCTION_CONSTANTS(MARLIN_SET_CONSTANT)
#undef MARLIN_SET_CONSTANT
  return values;
}

Pipeline new_pipeline(const Dispatch& dispatch) {
  const Library made = library(dispatch.instance);
  const std::string name = host_name(dispatch.instance);
  if (made.object == nil) return {nil, made.error, made.is_final};
  return compiled<id<MTLComputePipelineState>>([&](NSError** error) -> id<MTLComputePipelineState> {
    id<MTLFunction> function = [made.object newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]
                                                 constantValues:constant_values(dispatch.constants)
                                                          error:error];
    if (function == nil) return nil;
    id<MTLComputePipelineState> pipeline = [device() newComputePipelineStateWithFunction:function error:error];
    [function release];
    return pipeline;
  });
}

// Returns the reason why the pipeline cannot run the dispatch, or an empty text if it can run.
std::string refusal(const Pipeline& pipeline, const Dispatch& dispatch) {
  const std::string function = host_name(dispatch.instance);
  if (pipeline.object == nil) {
    return c10::str("kernel ", function, " (", info(dispatch.instance.kernel).library,
                    ".metal) does not compile: ", pipeline.error);
  }
  const uint64_t most = [pipeline.object maxTotalThreadsPerThreadgroup];
  const uint64_t threads = uint64_t{dispatch.threads.x} * dispatch.threads.y * dispatch.threads.z;
  if (threads <= most) return "";
  return c10::str("kernel ", function, " needs ", threads, " threads per threadgroup, but this GPU can run at most ",
                  most);
}

id<MTLComputePipelineState> pipeline_for(const Dispatch& dispatch) {
  const Pipeline pipeline =
      cache().pipelines.get({dispatch.instance, dispatch.constants}, [&] { return new_pipeline(dispatch); });
  const std::string text = refusal(pipeline, dispatch);
  if (!text.empty() && needs_tensor_units(dispatch.instance.kernel) && pipeline.is_final) throw NoTensorKernel(text);
  TORCH_CHECK(text.empty(), "torch_marlin_metal: ", text);
  return pipeline.object;
}

}  // namespace

const GpuDevice& gpu() {
  static const GpuDevice found = [] {
    try {
      (void)commit_seconds();
      return gpu_device(gpu_name(), gpu_core_count(), gpu_family());
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }();
  return found;
}

CompiledPlan compile(Plan plan) {
  print_plan_once(plan);
  CompiledPlan compiled{std::move(plan), {}};
  for (const Dispatch& dispatch : compiled.plan.dispatches)
    compiled.kernels.push_back({pipeline_for(dispatch), host_name(dispatch.instance)});
  return compiled;
}

}  // namespace marlin::mps
