// Each scenario breaks one rule of Metal in the order of its calls, or in its use of encoders, queues and objects.
#include "host.h"

namespace host {
namespace {

const bool added = add({
    {"encoding after endEncoding",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       Encoder e = [commands computeCommandEncoder];
       [e endEncoding];
       [e setComputePipelineState:pipeline("scale")];
     }},
    {"commit with an open encoder",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       Encoder e = [commands computeCommandEncoder];
       try {
         [commands commit];
       } catch (...) {
         [e endEncoding];
         throw;
       }
     }},
    {"encoding after commit",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       [commands commit];
       [commands computeCommandEncoder];
     }},
    {"wait before commit", [] { [[[[device() newCommandQueue] autorelease] commandBuffer] waitUntilCompleted]; }},
    {"encoder released unended",
     [] {
       @autoreleasepool {
         [[[[device() newCommandQueue] autorelease] commandBuffer] computeCommandEncoder];
       }
       wait();
     }},
    {"re-entrant dispatch_sync", [] { encode([](Encoder) { encode([](Encoder) {}); }); }},
    {"operator in the block",
     [] {
       at::Tensor x = at::empty({4}, at::device(at::kMPS));
       encode([&](Encoder) { x.fill_(1); });
     }},
    {"commit in the block", [] { encode([](Encoder) { torch::mps::commit(); }); }},
    {"synchronize in the block", [] { encode([](Encoder) { wait(); }); }},
    {"raw commit in the block",
     [] {
       encode([](Encoder e) {
         at::mps::getCurrentMPSStream()->endKernelCoalescing();
         (void)e;
         [torch::mps::get_command_buffer() commit];
       });
     }},
    {"encoder outside the queue", [] { (void)at::mps::getCurrentMPSStream()->commandEncoder(); }},
    {"kept encoder",
     [] {
       Encoder kept = nil;
       encode([&](Encoder e) { kept = e; });
       [kept setComputePipelineState:pipeline("scale")];
     }},
    {"exception over dispatch_sync",
     [] {
       dispatch_sync(at::mps::getCurrentMPSStream()->queue(), ^{
         throw std::runtime_error("from the block");
       });
     }},
    {"freed buffer",
     [] {
       id<MTLBuffer> freed = nil;
       @autoreleasepool {
         freed = buffer(64);
       }
       encode([&](Encoder e) { [e setBuffer:freed offset:0 atIndex:0]; });
     }},
    {"unpaired profiler",
     [] { encode([](Encoder) { at::mps::getMPSProfiler().beginProfileKernel(pipeline("scale"), "scale", false); }); }},
    {"profiler without a handle",
     [] { encode([](Encoder) { at::mps::getMPSProfiler().beginProfileKernel(nullptr, "scale", false); }); }},
    {"profiler twice",
     [] {
       encode([](Encoder) {
         for (const char* name : {"scale", "narrow"})
           at::mps::getMPSProfiler().beginProfileKernel(pipeline(name), name, false);
       });
     }},
    {"profiler of another kernel",
     [] {
       encode([](Encoder) {
         at::mps::getMPSProfiler().beginProfileKernel(pipeline("scale"), "scale", false);
         at::mps::getMPSProfiler().endProfileKernel(pipeline("narrow"));
       });
     }},
    {"profiler beside an encoder",
     [] {
       at::mps::getMPSProfiler().StartTrace("interval", false);
       struct Stop {
         ~Stop() { at::mps::getMPSProfiler().StopTrace(); }
       } stop;
       encode([](Encoder) { at::mps::getMPSProfiler().beginProfileKernel(pipeline("scale"), "scale", false); });
     }},
    {"pipeline of nil",
     [] {
       NSError* error = nil;
       [device() newComputePipelineStateWithFunction:nil error:&error];
     }},
    {"buffer of 0 bytes", [] { [device() newBufferWithLength:0 options:MTLResourceStorageModeShared]; }},
    {"constant of a vector type",
     [] {
       const std::array<float, 4> value{};
       MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
       [values setConstantValue:value.data() type:MTLDataType(6) atIndex:0];
     }},
});

}  // namespace
}  // namespace host
