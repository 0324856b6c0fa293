// Stand-in header with the types that ATen/mps/MPSProfiler.h names.
#pragma once
typedef struct os_log_s* os_log_t;
