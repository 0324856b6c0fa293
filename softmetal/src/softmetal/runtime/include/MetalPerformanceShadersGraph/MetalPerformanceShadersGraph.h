// Stand-in header with the classes that ATen/mps/MPSStream.h names. There is no graph compiler here.
#pragma once

#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraph;
@class MPSGraphExecutionDescriptor;
@class MPSGraphCompilationDescriptor;
