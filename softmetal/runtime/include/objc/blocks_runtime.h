// Stand-in header that declares only functions of Apple's SDK. clang includes it by this name for GNU runtimes.
#pragma once
#include <Block.h>
