// Stand-in header. With a GNU runtime, clang includes a header of this name. The functions of blocks are in Block.h.
#pragma once
#include <Block.h>
