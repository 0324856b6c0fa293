// Correct host code, as in an extension. `run_scenario(name)` returns "", or the text of an error.
#include <limits>

#include "host.h"

namespace host {
namespace {

const bool added_correct = add({
    {"correct",
     [] {
       id<MTLBuffer> x = buffer(64), y = buffer(64);
       auto* in = static_cast<float*>([x contents]);
       for (int i = 0; i < 16; ++i)
         in[i] = static_cast<float>(i);
       encode([&](Encoder e) {
         float factor = 3;
         bind_scale(e, x, y, factor);
         dispatch(e, 16, 8);
         factor = -1;  // setBytes has copied
       });
       expect(static_cast<uint32_t*>([y contents])[1] == 0xFFFFFFFFu, "nothing to run before the wait");
       wait();
       for (int i = 0; i < 16; ++i)
         expect(static_cast<float*>([y contents])[i] == 3.0F * static_cast<float>(i), "y = 3 x");
     }},
    {"two dispatches, one binding",
     [] {
       encode([](Encoder e) {
         bind_scale(e, zeros(64), buffer(64), 1);
         dispatch(e, 16, 16);
         [e setBufferOffset:16 atIndex:0];
         dispatch(e, 4, 4);
       });
     }},
    {"absent optional",
     [] {
       encode([](Encoder e) {
         bind_scale(e, zeros(64), buffer(64), 1);
         [e setBuffer:nil offset:0 atIndex:7];
         dispatch(e, 16, 16);
       });
     }},
    {"constants and macros",
     [] {
       NSError* error = nil;
       MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
       NSMutableDictionary* macros = [NSMutableDictionary dictionary];
       [macros setObject:@"0.5f" forKey:@"OFFSET"];
       [options setPreprocessorMacros:macros];
       id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kConstants]
                                                       options:options
                                                         error:&error];
       expect(library != nil, text_of(error).c_str());
       std::vector<id<MTLBuffer>> results;
       for (const uint32_t width : {5u, 9u}) {
         const bool negate = width == 9;
         MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
         [values setConstantValue:&width type:MTLDataTypeUInt atIndex:0];
         [values setConstantValue:&negate type:MTLDataTypeBool withName:@"negate"];
         id<MTLFunction> function = [library newFunctionWithName:@"fill" constantValues:values error:&error];
         expect(function != nil, text_of(error).c_str());
         id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
         expect(state != nil, text_of(error).c_str());
         results.push_back(buffer(16));
         encode([&](Encoder e) {
           [e setComputePipelineState:state];
           [e setBuffer:results.back() offset:0 atIndex:0];
           dispatch(e, 4, 4);
         });
       }
       wait();
       expect(static_cast<float*>([results[0] contents])[3] == 5.5F, "5.5 with width 5");
       expect(static_cast<float*>([results[1] contents])[3] == -8.5F, "-8.5 with width 9, negated");
     }},
    {"language version",
     [] {
       NSError* error = nil;
       NSString* source =
           @"#include <metal_stdlib>\nkernel void f(device bfloat* x [[buffer(0)]]) { x[0] = bfloat(1.0f); }";
       MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
       [options setLanguageVersion:MTLLanguageVersion2_4];
       expect([device() newLibraryWithSource:source options:options error:&error] == nil, "2.4 has no bfloat");
       expect(text_of(error).find("'bfloat'") != std::string::npos, text_of(error).c_str());
       [options setLanguageVersion:MTLLanguageVersion3_1];
       expect([device() newLibraryWithSource:source options:options error:&error] != nil, text_of(error).c_str());
     }},
    {"math functions",
     [] {
       NSString* source = @"#include <metal_stdlib>\n"
                           "kernel void f(device float* x [[buffer(0)]]) { x[0] = metal::max(x[0], 3.0f); }";
       const auto of_nan = [&](MTLCompileOptions* options) {
         NSError* error = nil;
         id<MTLLibrary> library = [device() newLibraryWithSource:source options:options error:&error];
         expect(library != nil, text_of(error).c_str());
         id<MTLFunction> function = [library newFunctionWithName:@"f"];
         id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
         id<MTLBuffer> x = buffer(4);
         static_cast<float*>([x contents])[0] = std::numeric_limits<float>::quiet_NaN();
         encode([&](Encoder e) {
           [e setComputePipelineState:state];
           [e setBuffer:x offset:0 atIndex:0];
           dispatch(e, 1, 1);
         });
         wait();
         return static_cast<float*>([x contents])[0];
       };
       MTLCompileOptions* safe = [[MTLCompileOptions new] autorelease];
       [safe setMathMode:MTLMathModeSafe];
       expect(of_nan(safe) != 3, "safe mode leaves the functions fast");
       [safe setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
       expect(of_nan(safe) == 3, "precise functions");
       MTLCompileOptions* before_15 = [[MTLCompileOptions new] autorelease];
       [before_15 setFastMathEnabled:NO];
       expect(of_nan(before_15) == 3, "fastMathEnabled of NO makes the functions precise");
     }},
    {"own encoder on PyTorch's buffer",
     [] {
       auto* stream = at::mps::getCurrentMPSStream();
       at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
         @autoreleasepool {
           Encoder e = [torch::mps::get_command_buffer() computeCommandEncoder];
           bind_scale(e, zeros(64), buffer(64), 1);
           dispatch(e, 16, 16);
           [e endEncoding];
         }
       });
     }},
    {"exception with rethrow", [] { encode([](Encoder) { throw std::runtime_error("from the block"); }); }},
    {"buffers live until the work has run",
     [] {
       id<MTLBuffer> y = buffer(64);
       @autoreleasepool {
         id<MTLBuffer> x = buffer(64);
         for (int i = 0; i < 16; ++i)
           static_cast<float*>([x contents])[i] = 2;
         encode([&](Encoder e) {
           bind_scale(e, x, y, 4);
           dispatch(e, 16, 16);
         });
       }
       wait();
       expect(static_cast<float*>([y contents])[15] == 8, "the freed input's values");
     }},
    {"freed memory is poison",
     [] {
       const uint8_t* bytes = nullptr;
       @autoreleasepool {
         bytes = static_cast<const uint8_t*>([zeros(64) contents]);
         expect(bytes[63] == 0, "zeros");
       }
       expect(bytes[0] == 0xFB && bytes[63] == 0xFB, "poison where a buffer was freed");
     }},
    {"commits in a block",
     [] {
       // Like MPSStream::copy: one block encodes into several command buffers and waits for the last one.
       auto* stream = at::mps::getCurrentMPSStream();
       id<MTLBuffer> x = zeros(64), y = zeros(64);
       static_cast<float*>([x contents])[15] = 2;
       encode([&](Encoder e) {
         bind_scale(e, x, y, 3);
         dispatch(e, 16, 16);
         stream->synchronize(at::mps::SyncType::COMMIT);
         bind_scale(stream->commandEncoder(), y, x, 5);
         dispatch(stream->commandEncoder(), 16, 16);
         stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
         expect(static_cast<float*>([x contents])[15] == 30, "both products before the end of the block");
         bind_scale(stream->commandEncoder(), x, y, 1);
         dispatch(stream->commandEncoder(), 16, 16);
         torch::mps::commit();
       });
       wait();
       expect(static_cast<float*>([y contents])[15] == 30, "the work after the wait");
     }},
    {"paired profiler",
     [] {
       encode([](Encoder) {
         id<MTLComputePipelineState> state = pipeline("scale");
         at::mps::getMPSProfiler().beginProfileKernel(state, "scale", false);
         at::mps::getMPSProfiler().endProfileKernel(state);
       });
     }},
    {"blit",
     [] {
       id<MTLBuffer> x = buffer(64), y = buffer(64);
       std::memset([x contents], 7, 64);
       at::mps::getCurrentMPSStream()->copy(x, y, 32, 8, 16, 0, at::mps::SyncType::COMMIT_AND_WAIT);
       const auto* bytes = static_cast<const uint8_t*>([y contents]);
       expect(bytes[15] == 0xFF && bytes[16] == 7 && bytes[47] == 7 && bytes[48] == 0xFF,
              "32 bytes copied, the rest poison");
     }},
    {"device",
     [] {
       expect([device() supportsFamily:MTLGPUFamilyApple7] && ![device() supportsFamily:MTLGPUFamilyApple9], "an M1");
       expect([device() maxThreadgroupMemoryLength] == 32768, "32 KB of threadgroup memory");
       expect([pipeline("scale") threadExecutionWidth] == 32, "32 lanes");
       expect(strcmp([[device() name] UTF8String], "softmetal") == 0, "the name softmetal");
       expect([device() registryID] != 0 && [device() recommendedMaxWorkingSetSize] > 0, "ids and sizes");
     }},
    {"the system's version",
     [] {
       const auto version = [](const char* set) {
         set == nullptr ? unsetenv("SOFTMETAL_MACOS") : setenv("SOFTMETAL_MACOS", set, 1);
         const NSOperatingSystemVersion now = [[NSProcessInfo processInfo] operatingSystemVersion];
         unsetenv("SOFTMETAL_MACOS");
         return std::to_string(now.majorVersion) + "." + std::to_string(now.minorVersion) + "." +
                std::to_string(now.patchVersion);
       };
       expect(version(nullptr) == "26.2.0" && version("15.6") == "15.6.0", "26.2, or what SOFTMETAL_MACOS names");
       std::string refused;
       try {
         version("26.x");
       } catch (const std::invalid_argument& error) {
         refused = error.what();
       }
       unsetenv("SOFTMETAL_MACOS");
       expect(refused == "SOFTMETAL_MACOS: expected a version such as 26.2, got 26.x", "two numbers");
     }},
    {"tensors of an M5",
     [] {
       const auto messages = [](const char* family, MTLLanguageVersion version) -> std::string {
         family == nullptr ? unsetenv("SOFTMETAL_FAMILY") : setenv("SOFTMETAL_FAMILY", family, 1);
         MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
         [options setLanguageVersion:version];
         NSError* error = nil;
         id<MTLLibrary> library = [device() newLibraryWithSource:@"#include <metal_tensor>\nkernel void f() {}\n"
                                                         options:options
                                                           error:&error];
         return library != nil ? "" : [[error localizedDescription] UTF8String];
       };
       const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
       expect(has(messages("10", MTLLanguageVersion3_2), "Metal language version 4.0"), "MSL 3.2 has no tensors");
       expect(messages("10", MTLLanguageVersion4_0).empty() && [device() supportsFamily:MTLGPUFamilyApple10], "an M5");
       expect(has(messages("9", MTLLanguageVersion4_0), "no tensor units"), "an M4 has no tensor units");
       expect(has(messages(nullptr, MTLLanguageVersion4_0), "no tensor units"), "an M1 has no tensor units");
       std::string refused;
       try {
         messages("11", MTLLanguageVersion4_0);
       } catch (const std::invalid_argument& error) {
         refused = error.what();
       }
       unsetenv("SOFTMETAL_FAMILY");
       expect(refused == "SOFTMETAL_FAMILY: expected 7 to 10, got 11", "no family of the future");
     }},
});

}  // namespace
}  // namespace host

extern "C" __attribute__((visibility("default"))) const char* run_scenario(const char* name) {
  static std::string message;
  try {
    @autoreleasepool {
      host::scenarios().at(name)();
    }
    message.clear();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
