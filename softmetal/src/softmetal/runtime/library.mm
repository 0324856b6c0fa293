// Libraries, functions and pipelines. The executor's compiler makes them from Metal source text.
#include <algorithm>
#include <cstdlib>

#include "function_constants.h"
#include "metal.h"

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

namespace softmetal {

const sm_library* Program::open(bool checked, const char* kernel) const {
  std::vector<sm_constant_value> values;
  for (const Constant& constant : constants) {
    values.push_back({constant.name.empty() ? nullptr : constant.name.c_str(), constant.index, constant.value.c_str()});
  }
  std::vector<const char*> macros;
  for (const std::string& define : defines)
    macros.push_back(define.c_str());
  sm_compile_request request{};
  request.source = source.c_str();
  request.constants = values.data();
  request.constant_count = static_cast<uint32_t>(values.size());
  request.checked = checked;
  request.math = math;
  request.fast_functions = fast_functions;
  request.kernel = kernel;
  request.defines = macros.data();
  request.define_count = static_cast<uint32_t>(macros.size());
  request.language_version = language_version;
  char* text = nullptr;
  const auto take = [&text] {
    std::string taken = text;
    sm_free_text(text);
    return taken;
  };
  const int failed = sm_compile(&request, &text);
  const std::string path_or_error = take();
  if (failed != 0) throw std::runtime_error(path_or_error);
  const sm_library* library = sm_library_open(path_or_error.c_str(), &text);
  if (library == nullptr) throw std::runtime_error(take());
  return library;
}

const sm_library* Kernel::library(bool checked) {
  const std::lock_guard lock(mutex_);
  const sm_library*& library = libraries_[checked];
  if (library == nullptr) library = program_.open(checked, name_.c_str());
  return library;
}

const sm_kernel* Kernel::kernel(bool checked) {
  return sm_library_find(library(checked), name_.c_str());
}

namespace {

struct CompileSettings {
  NSDictionary* macros = nil;
  BOOL fast_math = YES;
  MTLMathMode math_mode = MTLMathModeFast;
  MTLMathFloatingPointFunctions functions = MTLMathFloatingPointFunctionsFast;
  MTLLanguageVersion version = MTLLanguageVersion3_1;
};
CompileSettings& settings(MTLCompileOptions* options) {
  return *static_cast<CompileSettings*>(options->_state);
}

void set_error(NSError** error, MTLLibraryError code, const std::string& message) {
  if (error != nullptr) *error = softmetal::make_error(MTLLibraryErrorDomain, code, message);
}

// Calls the compile hook, if a test has set one. Returns false and the hook's error if the compile must fail.
bool may_compile(bool is_pipeline, const std::string& text, NSError** error) {
  const auto hook = Device::get().compile_hook.load();
  if (hook == nullptr) return true;
  std::array<char, 1024> message{};
  hook(is_pipeline, text.c_str(), message.data(), message.size());
  if (message[0] == '\0') return true;
  set_error(error, MTLLibraryErrorInternal, message.data());
  return false;
}

}  // namespace
}  // namespace softmetal

using softmetal::settings;

@implementation MTLCompileOptions
- (id)init {
  _state = new softmetal::CompileSettings();
  return self;
}
- (void)dealloc {
  [settings(self).macros release];
  delete &settings(self);
  [super dealloc];
}
- (NSDictionary*)preprocessorMacros {
  return settings(self).macros;
}
- (void)setPreprocessorMacros:(NSDictionary*)macros {
  [macros retain];
  [settings(self).macros release];
  settings(self).macros = macros;
}
- (BOOL)fastMathEnabled {
  return settings(self).fast_math;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  settings(self).fast_math = enabled;
  settings(self).math_mode = enabled ? MTLMathModeFast : MTLMathModeSafe;
  settings(self).functions = enabled ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
}
- (MTLMathMode)mathMode {
  return settings(self).math_mode;
}
- (void)setMathMode:(MTLMathMode)mode {
  settings(self).math_mode = mode;
  settings(self).fast_math = mode == MTLMathModeFast;
}
- (MTLMathFloatingPointFunctions)mathFloatingPointFunctions {
  return settings(self).functions;
}
- (void)setMathFloatingPointFunctions:(MTLMathFloatingPointFunctions)functions {
  settings(self).functions = functions;
}
- (MTLLanguageVersion)languageVersion {
  return settings(self).version;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
  settings(self).version = version;
}
@end

@interface SoftMetalFunction : SoftMetalObject <MTLFunction> {
 @public
  softmetal::Program* program;
  std::string* functionName;
}
@end

@implementation SoftMetalFunction
- (void)dealloc {
  delete program;
  delete functionName;
  [super dealloc];
}
- (NSString*)name {
  return [NSString stringWithUTF8String:functionName->c_str()];
}
@end

@interface SoftMetalLibrary : SoftMetalObject <MTLLibrary> {
 @public
  softmetal::Program* program;
  const sm_library* library;
}
@end

@implementation SoftMetalLibrary
- (void)dealloc {
  delete program;
  [super dealloc];
}
- (NSArray*)functionNames {
  std::vector<id> names;
  for (uint32_t i = 0; i < sm_library_kernel_count(library); ++i) {
    names.push_back([NSString stringWithUTF8String:sm_library_kernel(library, i)->name]);
  }
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self newFunctionWithName:name constantValues:nil error:nil];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  if (sm_library_find(library, [name UTF8String]) == nullptr) {
    softmetal::set_error(error, MTLLibraryErrorFunctionNotFound,
                         std::string("no function '") + [name UTF8String] + "' in the library");
    return nil;
  }
  if (values != nil) {
    const std::string wrong = softmetal::wrong_type(library, softmetal::constants_of(values));
    if (!wrong.empty()) {
      softmetal::set_error(error, MTLLibraryErrorCompileFailure, wrong);
      return nil;
    }
  }
  SoftMetalFunction* function = [[SoftMetalFunction alloc] init];
  function->program = new softmetal::Program(*program);
  function->functionName = new std::string([name UTF8String]);
  if (values != nil) function->program->constants = softmetal::constants_of(values);
  return function;
}
@end

@implementation SoftMetalPipeline
- (void)dealloc {
  delete kernel;
  [super dealloc];
}
- (NSString*)label {
  return [NSString stringWithUTF8String:kernel->name().c_str()];
}
- (NSUInteger)allocatedSize {
  return 0;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  const softmetal::Device& device = softmetal::Device::get();
  const uint32_t limit = kernel->kernel(device.checked)->max_total_threads, most = device.thread_limit;
  return limit == 0 ? most : std::min(limit, most);
}
- (NSUInteger)threadExecutionWidth {
  return SM_SIMD_WIDTH;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return kernel->kernel(softmetal::Device::get().checked)->static_threadgroup_bytes;
}
@end

namespace softmetal {
namespace {

id<MTLLibrary> open_library(Program program, NSError** error) {
  try {
    const sm_library* opened = program.open(Device::get().checked, "");
    SoftMetalLibrary* library = [[SoftMetalLibrary alloc] init];
    library->program = new Program(std::move(program));
    library->library = opened;
    return library;
  } catch (const std::runtime_error& failure) {
    set_error(error, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
}

}  // namespace
}  // namespace softmetal

id<MTLLibrary> softmetal_new_library(NSString* source, MTLCompileOptions* options, NSError** error) {
  softmetal::Program program{[source UTF8String], {}, {}, {}};
  if (!softmetal::may_compile(false, program.source, error)) return nil;
  if (options != nil) {
    const MTLMathMode mode = settings(options).math_mode;
    program.math = mode == MTLMathModeSafe ? SM_MATH_SAFE : mode == MTLMathModeFast ? SM_MATH_FAST : SM_MATH_RELAXED;
    program.fast_functions = settings(options).functions == MTLMathFloatingPointFunctionsFast;
    const auto version = static_cast<uint32_t>(settings(options).version);
    program.language_version = (version >> 16) * 100 + (version & 0xffff) * 10;
    // Only language 4.0 and later has tensors. Earlier versions do not get the macro, because every macro changes the
    // identity of a library and would cause a new compile.
    if (program.language_version >= 400 && softmetal::apple_family() < MTLGPUFamilyApple10) {
      program.defines.emplace_back("__SOFTMETAL_CHIP_WITHOUT_TENSORS__=1");
    }
    if (const char* foreign = std::getenv("SOFTMETAL_FOREIGN_TENSORS"); program.language_version >= 400 && foreign) {
      program.defines.push_back(std::string("SOFTMETAL_FOREIGN_TENSORS=") + foreign);
    }
    NSDictionary* macros = settings(options).macros;
    NSArray* names = [macros allKeys];
    for (NSUInteger i = 0; i < [names count]; ++i) {
      id name = [names objectAtIndex:i];
      program.defines.push_back(std::string([[name description] UTF8String]) + "=" +
                                [[[macros objectForKey:name] description] UTF8String]);
    }
  }
  return softmetal::open_library(std::move(program), error);
}

id<MTLComputePipelineState> softmetal_new_pipeline(id<MTLFunction> function, NSError** error) {
  if (function == nil)
    softmetal::violation("function", "newComputePipelineStateWithFunction: expected a function, got nil");
  auto* made = static_cast<SoftMetalFunction*>(function);
  if (!softmetal::may_compile(true, *made->functionName, error)) return nil;
  auto kernel = std::make_unique<softmetal::Kernel>(*made->program, *made->functionName);
  try {
    const uint32_t bytes = kernel->kernel(softmetal::Device::get().checked)->static_threadgroup_bytes;
    if (bytes > SM_MAX_THREADGROUP_BYTES) {
      throw std::runtime_error("kernel '" + *made->functionName + "' declares " + std::to_string(bytes) +
                               " bytes of threadgroup memory, at most " + std::to_string(SM_MAX_THREADGROUP_BYTES));
    }
  } catch (const std::runtime_error& failure) {
    softmetal::set_error(error, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
  SoftMetalPipeline* pipeline = [[SoftMetalPipeline alloc] init];
  pipeline->kernel = kernel.release();
  return pipeline;
}
