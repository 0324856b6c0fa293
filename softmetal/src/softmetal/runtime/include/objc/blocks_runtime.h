// Stand-in header. With a GNU runtime, clang includes a header of this name. Block.h declares the functions of blocks.
#pragma once
#include <Block.h>
