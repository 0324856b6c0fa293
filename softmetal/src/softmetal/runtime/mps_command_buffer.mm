// MPSCommandBuffer: the command buffer of PyTorch's stream. commitAndContinue replaces the wrapped command buffer.
#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include "metal.h"

namespace {
SoftMetalCommandBuffer*& root(MPSCommandBuffer* buffer) {
  return *reinterpret_cast<SoftMetalCommandBuffer**>(&buffer->_state);
}
}  // namespace

@implementation MPSCommandBuffer
+ (MPSCommandBuffer*)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  MPSCommandBuffer* buffer = [[[self alloc] init] autorelease];
  root(buffer) = [static_cast<SoftMetalCommandBuffer*>([queue commandBuffer]) retain];
  root(buffer)->needsQueue = YES;
  return buffer;
}
- (void)dealloc {
  [root(self) release];
  [super dealloc];
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return root(self);
}
- (void)commitAndContinue {
  id<MTLCommandQueue> queue = [root(self) commandQueue];
  root(self)->needsQueue = NO;  // a block may commit here, because the wrapper then continues with a new buffer
  [root(self) commit];
  [root(self) release];
  root(self) = [static_cast<SoftMetalCommandBuffer*>([queue commandBuffer]) retain];
  root(self)->needsQueue = YES;
}
- (id<MTLDevice>)device {
  return [root(self) device];
}
- (id<MTLCommandQueue>)commandQueue {
  return [root(self) commandQueue];
}
- (NSString*)label {
  return [root(self) label];
}
- (void)setLabel:(NSString*)label {
  [root(self) setLabel:label];
}
- (MTLCommandBufferStatus)status {
  return [root(self) status];
}
- (NSError*)error {
  return [root(self) error];
}
- (double)GPUStartTime {
  return [root(self) GPUStartTime];
}
- (double)GPUEndTime {
  return [root(self) GPUEndTime];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [root(self) addCompletedHandler:block];
}
- (void)commit {
  [root(self) commit];
}
- (void)waitUntilCompleted {
  [root(self) waitUntilCompleted];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [root(self) computeCommandEncoder];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [root(self) blitCommandEncoder];
}
@end
