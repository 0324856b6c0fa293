// Stand-in header with the types and the clock that ATen/mps/MPSProfiler.h names.
#pragma once

#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include <csignal>

typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;

#ifndef __APPLE__
static inline uint64_t clock_gettime_nsec_np(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
#endif
