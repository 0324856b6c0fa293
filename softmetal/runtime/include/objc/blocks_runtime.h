// Stand-in header: declares only what exists in Apple's SDK. clang includes it by this name for GNU runtimes.
#pragma once
#include <Block.h>
