// Stand-in header. For GNU runtimes, clang includes a header of this name. It declares only functions of Apple's SDK.
#pragma once
#include <Block.h>
