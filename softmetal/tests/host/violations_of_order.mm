// Each scenario breaks one rule of Metal about the order of calls, or about the use of encoders, queues and objects.
#include "host.h"

extern "C" char* softmetal_set_stream(int64_t number);

namespace host {
namespace {

// While an object of this class exists, PyTorch's profiler records.
struct Profiling {
  Profiling() { at::mps::getMPSProfiler().StartTrace("interval", false); }
  ~Profiling() { at::mps::getMPSProfiler().StopTrace(); }
};

// While an object of this class exists, the thread's current stream is stream 1.
struct OtherStream {
  OtherStream() { softmetal_set_stream(1); }
  ~OtherStream() { softmetal_set_stream(0); }
};

const bool added_violations_of_order = add({
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
    {"wait in the block", [] { encode([](Encoder) { torch::mps::synchronize(); }); }},
    {"encoder after NONE",
     [] {
       encode([](Encoder e) {
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::NONE);
         [e setComputePipelineState:pipeline("scale")];
       });
     }},
    {"encoder after the profiler",
     [] {
       const Profiling profiling;
       id<MTLComputePipelineState> state = pipeline("scale");
       at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
         at::mps::getMPSProfiler().beginProfileKernel(state, "scale", false);
         at::mps::getMPSProfiler().endProfileKernel(state);
         at::mps::getMPSProfiler().beginProfileKernel(state, "scale", false);
         Encoder e = at::mps::getCurrentMPSStream()->commandEncoder();
         at::mps::getCurrentMPSStream()->endKernelCoalescing();
         at::mps::getMPSProfiler().endProfileKernel(state);
         [e setComputePipelineState:state];
       });
     }},
    {"handler in the block",
     [] {
       encode([](Encoder) {
         at::mps::getCurrentMPSStream()->addCompletedHandler(^(id<MTLCommandBuffer>){
         });
       });
     }},
    {"handler beside an encoder",
     [] {
       encode([](Encoder) {
         [at::mps::getCurrentMPSStream()->commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer>){
         }];
       });
     }},
    {"encoder of another stream",
     [] {
       auto* mine = at::mps::getCurrentMPSStream();
       at::mps::dispatch_sync_with_rethrow(mine->queue(), ^{
         const OtherStream other;
         (void)at::mps::getCurrentMPSStream()->commandEncoder();
       });
     }},
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
       const Profiling profiling;
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
